"""Writes and submits jobs of SLURM, Kubernetes and Vertex AI: files for their schedulers, written only after every
check that this machine can make."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llava_mcore.config.rules.jobs import check_job
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError, problems
from llava_mcore.files.regular import naming
from llava_mcore.launch.jobs import kubernetes, slurm, vertex
from llava_mcore.launch.jobs.kubernetes import MANIFESTS, ClusterJob
from llava_mcore.launch.jobs.options import read_options
from llava_mcore.launch.jobs.slurm import BATCH_FILE, batch_file
from llava_mcore.launch.jobs.volumes import SHARED_MEMORY, outside_of_volumes, volumes_of
from llava_mcore.launch.preflight import completion, preflight_of_job, resolve, with_epochs


class _JobDumper(yaml.SafeDumper):
    """Writes repeated values in full instead of as references, and multi-line text as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: no part is a reference."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the node of a text."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_JobDumper.add_representer(str, _JobDumper.represent_str)


@dataclass(frozen=True)
class BatchJob:
    """A job's file: its path, its text, what the user should know first, and `completion` as in Launch.

    command: what creates the job from the file; None for SLURM's.
    """

    file: Path
    text: str
    notes: tuple[str, ...] = ()
    completion: str | None = None
    command: tuple[str, ...] | None = None


def prepare_job(typed: RunConfig, arguments: Sequence[str], keys: Collection[str] = ()) -> BatchJob:
    """Return SLURM's batch file. Checks everything that does not need the nodes; nothing is written.

    Args:
        arguments: command line of `train` for the job.
        keys: keys set by flags, for messages about flags without effect.

    Raises:
        ConfigError: lists everything that prevents the run from starting.
    """
    run, gpus, notes = _checked(typed, keys, "--submit")
    finished = None if notes else completion(with_epochs(run))
    if run.checkpoint.unsaved is not None:
        notes.append(run.checkpoint.unsaved)
    text = batch_file(run.name, run.launch, run.run_dir, arguments, on_gpus=gpus > 0, cpus=_cpus_per_node(run))
    return BatchJob(run.run_dir / BATCH_FILE, text, tuple(notes), finished)


def prepare_cluster_job(typed: RunConfig, arguments: Sequence[str], keys: Collection[str] = ()) -> BatchJob:
    """Return the file of a job for Kubernetes (--k8s) or Vertex AI (--vertex), in the current folder; nothing is
    written. Arguments and errors are those of `prepare_job`."""
    launch, image = typed.launch, typed.launch.image
    kind = launch.k8s or "vertex"
    errors = list(check_job(launch))
    if errors or image is None:
        raise ConfigError(problems("The job cannot be written", errors))
    options = read_options(launch.job_options, kubernetes.SECTIONS if launch.k8s else vertex.SECTIONS)
    # The job itself: its processes are known without any folder.
    job = ClusterJob(
        name=typed.name,
        num_nodes=launch.num_nodes or 1,
        gpus=launch.num_gpus if typed.parallel.backend != "gloo" else 0,
        cpus=_cpus_per_node(typed),
        image=image,
        arguments=tuple(arguments),
        volumes=volumes_of(launch.volumes),
        options=options,
    )
    if launch.vertex is not None:
        spec = vertex.custom_job(job, launch.vertex)
        mounted = [vertex.BUCKETS, *(volume.path for volume in job.volumes)]
        if typed.checkpoint.save_dir is None:
            typed = _saving_in(typed, vertex.output_folder(spec))
        file = Path(f"{typed.name}.vertex.yaml")
        command = ["gcloud", "ai", "custom-jobs", "create", f"--display-name={typed.name}", f"--config={file}"]
    else:
        spec = MANIFESTS[kind](job)
        mounted = _mounts(spec)
        file = Path(f"{typed.name}.{kind}.yaml")
        command = ["kubectl", "create", "--filename", str(file)]
    outside = outside_of_volumes(typed, mounted)
    if outside:
        raise ConfigError(problems("The container would lack what the run reads or writes", outside))
    run, _, notes = _checked(typed, keys, f"--{'k8s ' + kind if launch.k8s else kind}")
    notes += [note for note in (run.checkpoint.unsaved, _will_not_resume(run)) if note is not None]
    note = f"# Written by llava_mcore's train; {shlex.join(command)}\n"
    text = note + yaml.dump(spec, Dumper=_JobDumper, sort_keys=False, allow_unicode=True, width=110)
    return BatchJob(file, text, tuple(notes), command=tuple(command))


def write(job: BatchJob) -> None:
    """Write a job's file."""
    job.file.parent.mkdir(parents=True, exist_ok=True)
    with naming(job.file):
        job.file.write_text(job.text, encoding="utf-8")


def submit(job: BatchJob) -> str:
    """Write a job's file, submit it, and return the job's id, or what the command printed.

    Raises:
        ConfigError: the scheduler's program is not installed, or refuses the job.
    """
    write(job)
    if job.command is None:
        return slurm.submit(job.file)
    program = job.command[0]
    if shutil.which(program) is None:
        raise ConfigError(f"--submit needs {program} on PATH; {job.file} was written: {shlex.join(job.command)}")
    done = subprocess.run(job.command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{program} refused {job.file}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip() or done.stderr.strip()


def _checked(typed: RunConfig, keys: Collection[str], flag: str) -> tuple[RunConfig, int, list[str]]:
    """Return the resolved run, its GPUs per node (0 for gloo), and what could not be checked here."""
    on_gpus = typed.parallel.backend != "gloo"
    gpus = typed.launch.num_gpus
    if gpus < 0:
        raise ConfigError(f"{flag} needs the number of GPUs per node (with --backend gloo: of processes): give -g")
    run, world_size = resolve(typed, gpus if on_gpus else 0)
    errors, notes = preflight_of_job(run, world_size, gpus if on_gpus else 0, keys)
    if errors:
        raise ConfigError(problems("The run cannot start", errors))
    return run, gpus if on_gpus else 0, notes


def _cpus_per_node(run: RunConfig) -> int:
    """Return the number of a node's training and loader processes, if the replicas are divided evenly over nodes."""
    parallel, per_node = run.parallel, run.launch.num_gpus
    return per_node + run.data.num_workers * -(-per_node // parallel.replica_size)


def _saving_in(run: RunConfig, folder: Path | None) -> RunConfig:
    """Return a run that saves in a folder: the one that Vertex AI will name when it starts (AIP_CHECKPOINT_DIR)."""
    return run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"save_dir": folder})})


def _mounts(manifest: dict[str, Any]) -> list[str]:
    """Return the folders where a manifest's first container mounts volumes, those of --job-options included."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    else:
        pod = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    return [path for path in mounts if path != SHARED_MEMORY]


def _will_not_resume(run: RunConfig) -> str | None:
    """Return a warning if a job that is started again would begin from the start; else None."""
    checkpoint = run.checkpoint
    if checkpoint.saves and checkpoint.save_optim and checkpoint.load_optim:
        return None
    return (
        "a job whose machines are replaced is started again: it resumes only with --save-interval, --save-optim and "
        "--load-optim"
    )
