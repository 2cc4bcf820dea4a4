"""Manifests for Kubernetes: a JobSet, or a PyTorchJob of Kubeflow's training operator.

In both, a pod is a node of the run: its container runs `train`, which starts the node's ranks. When Kubernetes ends a
pod (preemption, a drained node), its `train` gets SIGTERM. Then all nodes save after the same iteration and end with
exit code 75, and Kubernetes starts all pods again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llava_mcore.config.sections.launch import Volume
from llava_mcore.errors import ConfigError
from llava_mcore.launch.jobs.options import merged
from llava_mcore.launch.jobs.volumes import pod_volumes
from llava_mcore.processes.control import STOPPED_EARLY

SECTIONS = ("metadata", "spec", "pod_metadata", "pod", "container")
"""Sections of --job-options: of the manifest, and of its pods."""
SECONDS_TO_SAVE = 300
"""Seconds between SIGTERM and SIGKILL (terminationGracePeriodSeconds). Spot machines give less, whatever a pod asks
for."""
MAX_RESTARTS = 20
"""How often all pods are started again after failures. In a JobSet, restarts after a saved stop (75) do not count."""
PORT = 29500
FINAL = (2, 3)
"""Exit codes after which a restart would fail again: a mistake in configuration or data, and a failed training."""
_REPLICATED_JOB = "node"
_LONGEST_NAME = 40
"""A pod's name is the job's and up to 20 characters more; as a host name it may have 63."""

RETRIED = f"""\
"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
trap 'kill -INT "$child"' INT
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
case $code in 0|{"|".join(map(str, FINAL))}) exit "$code";; esac
[ "$code" -ge 128 ] || code=143
exit "$code"
"""
"""Runs a command for a PyTorchJob, which restarts pods whose exit code is 128 or more: signals are handed on to it, and
codes of runs that can continue (75: stopped early, 1: lost another node, 124: hung) become 143."""


@dataclass(frozen=True)
class ClusterJob:
    """A run as a job of a cluster.

    Attributes:
        name: name of the run.
        num_nodes: machines of the run.
        gpus: GPUs of each; 0 for a run on CPUs.
        cpus: training and loader processes of each.
        arguments: the command line of `train`, without the machine's rank and the first one's address.
        options: sections of --job-options.
    """

    name: str
    num_nodes: int
    gpus: int
    cpus: int
    image: str
    arguments: tuple[str, ...]
    volumes: tuple[Volume, ...]
    options: Mapping[str, Mapping[str, Any]]

    @property
    def command(self) -> list[str]:
        """The command of every container."""
        return ["python3", "-m", "llava_mcore", "train", *self.arguments]


def job_name(run_name: str) -> str:
    """Return a name for Kubernetes: lower-case letters, digits and dashes.

    Raises:
        ConfigError: nothing is left of the name, or it is too long.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"--name {run_name}: as a name in Kubernetes it would be {name!r}, which has to begin with a letter and to "
            f"have at most {_LONGEST_NAME} characters: choose another name"
        )
    return name


def job_set(job: ClusterJob) -> dict[str, Any]:
    """Return the manifest of a JobSet: one indexed Job, whose pods find the first one by its name."""
    name = job_name(job.name)
    arguments: list[str] = []
    if job.num_nodes > 1:  # the pod's rank is in JOB_COMPLETION_INDEX
        first = f"{name}-{_REPLICATED_JOB}-0-0.{name}"
        arguments = ["--master-addr", first, "--master-port", str(PORT)]
    container = {"name": "train", "command": _literal([*job.command, *arguments])}
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    template: dict[str, Any] = {
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        # Only the pods that have ended are replaced after an orderly stop; a failure of one restarts all.
        "podFailurePolicy": {"rules": [disrupted, _on_exit("FailJob", FINAL), _on_exit("Ignore", [STOPPED_EARLY])]},
        "template": _pod_template(job, container, restart_policy="Never"),
    }
    failed = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [failed]},
        "replicatedJobs": [{"name": _REPLICATED_JOB, "replicas": 1, "template": {"spec": template}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec, job)


def pytorch_job(job: ClusterJob) -> dict[str, Any]:
    """Return the manifest of a PyTorchJob: a master and workers, whose ranks and address the operator sets."""
    container = {"name": "pytorch", "command": ["bash", "-c", RETRIED, "train", *_literal(job.command)]}
    replica = {
        "replicas": 1,
        "restartPolicy": "ExitCode",
        "template": _pod_template(job, container, restart_policy=None),
    }
    replicas = {"Master": replica}
    if job.num_nodes > 1:
        replicas["Worker"] = replica | {"replicas": job.num_nodes - 1}
    spec = {"runPolicy": {"backoffLimit": MAX_RESTARTS, "cleanPodPolicy": "None"}, "pytorchReplicaSpecs": replicas}
    return _object("kubeflow.org/v1", "PyTorchJob", job_name(job.name), spec, job)


def _object(version: str, kind: str, name: str, spec: dict[str, Any], job: ClusterJob) -> dict[str, Any]:
    options = job.options
    metadata = merged({"name": name}, options.get("metadata", {}))
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": merged(spec, options.get("spec", {}))}


def _literal(command: Sequence[str]) -> list[str]:
    """Escape a command for Kubernetes, which would replace `$(NAME)` by the value of a variable."""
    return [text.replace("$(", "$$(") for text in command]


def _on_exit(action: str, codes: Sequence[int]) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": "train", "operator": "In", "values": list(codes)},
    }


def _pod_template(job: ClusterJob, container: Mapping[str, Any], *, restart_policy: str | None) -> dict[str, Any]:
    """Return the template of a node's pod: container, volumes, resources and the user's options."""
    volumes, mounts = pod_volumes(job.volumes)
    resources: dict[str, Any] = {"requests": {"cpu": str(job.cpus)}}
    if job.gpus:
        resources["limits"] = {"nvidia.com/gpu": job.gpus}
    surroundings = {"image": job.image, "resources": resources, "volumeMounts": mounts}
    pod: dict[str, Any] = {
        **({} if restart_policy is None else {"restartPolicy": restart_policy}),
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        "containers": [merged({**container, **surroundings}, job.options.get("container", {}))],
        "volumes": volumes,
    }
    template: dict[str, Any] = {"spec": merged(pod, job.options.get("pod", {}))}
    if "pod_metadata" in job.options:
        template["metadata"] = dict(job.options["pod_metadata"])
    return template


MANIFESTS = {"jobset": job_set, "pytorchjob": pytorch_job}
"""Kinds of --k8s."""
