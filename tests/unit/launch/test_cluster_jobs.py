"""Jobs for Kubernetes and Vertex AI: their files by the official schemas, and what the containers make of them."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from llava_mcore.cli import train
from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.load import load_run_config
from llava_mcore.config.sections.launch import LaunchConfig, Volume, parse_volume
from llava_mcore.errors import ConfigError
from llava_mcore.launch.cluster_env import read_cluster
from llava_mcore.launch.jobs.arguments import job_arguments
from llava_mcore.launch.jobs.kubernetes import RETRIED, job_name
from llava_mcore.launch.jobs.options import merged
from llava_mcore.launch.nodes import Nodes, find_nodes
from llava_mcore.launch.start import with_save_dir
from llava_mcore.launch.torchrun_command import worker_env

SCHEMAS = Path(__file__).parent / "schemas"
RUN = ["-g", "8", "--node", "3", "--name", "My_run", "--train-iters", "9", "--global-batch-size", "24", "--dry-run"]
FOLDERS = ["--megatron-load-dir", "/data/m", "--tokenizer-load-dir", "/data/hf", "--data-path", "/data/shards"]
KUBERNETES = [*FOLDERS, "--save-dir", "/runs", "--image", "reg/llava:1", "--volume", "data:/data:ro", "runs:/runs"]
ON_VERTEX = ["--megatron-load-dir", "/gcs/b/m", "--tokenizer-load-dir", "/gcs/b/hf", "--data-path", "/gcs/b/s"]
ON_VERTEX += ["--image", "reg/llava:1", "--volume", "nfs://10.0.0.2/share:/mnt/nfs/x", "--save-dir", "/mnt/nfs/x/runs"]
KINDS = {
    "jobset": [*RUN, *KUBERNETES, "--k8s", "jobset"],
    "pytorchjob": [*RUN, *KUBERNETES, "--k8s", "pytorchjob"],
    "vertex": [*RUN, *ON_VERTEX, "--vertex", "a3-highgpu-8g"],
}


def written(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what a command would write, which the official schema allows."""
    assert train.main(argv) == 0, capsys.readouterr().err
    job = yaml.safe_load(capsys.readouterr().out)
    kind = job.get("kind", "vertex").lower()
    jsonschema.validate(job, json.loads((SCHEMAS / f"{kind}.json").read_text()))
    return job


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert train.main(argv) == 2
    return capsys.readouterr().err


def options(folder: Path, content: dict[str, Any]) -> list[str]:
    (folder / "options.yaml").write_text(yaml.safe_dump(content))
    return ["--job-options", str(folder / "options.yaml")]


def pod_of(job: Any) -> Any:
    if job["kind"] == "JobSet":
        return job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]


def launch_of(command: list[str]) -> LaunchConfig:
    """Return how a container's command starts the run."""
    start = command.index("llava_mcore") + 2
    assert command[start - 4 : start] == ["python3", "-m", "llava_mcore", "train"]
    return parse_command_line(command[start:], "run.py").load().launch


def test_job_set(capsys: pytest.CaptureFixture[str]) -> None:
    job = written(KINDS["jobset"], capsys)
    indexed = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["metadata"]["name"], indexed["completions"], indexed["completionMode"]) == ("my-run", 3, "Indexed")
    pod = pod_of(job)["spec"]
    container = pod["containers"][0]
    # Each pod finds itself by its index, and the first one by the name that JobSet gives it.
    launch = launch_of(container["command"])
    for rank in range(3):
        found = find_nodes(launch, {"JOB_COMPLETION_INDEX": str(rank)})
        assert found == Nodes(3, rank, "my-run-node-0-0.my-run", 29500, "none")
    assert job["spec"]["network"]["enableDNSHostnames"]
    # Mistakes end it; a stop that saved and a preempted pod do not count; everything else starts all pods again.
    rules = indexed["podFailurePolicy"]["rules"]
    by_codes = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in rules if "onExitCodes" in rule}
    assert by_codes == {(2, 3): "FailJob", (75,): "Ignore"}
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (indexed["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert job["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    # What a node needs.
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["terminationGracePeriodSeconds"] == 300
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"] == {"claimName": "runs"}


def test_pytorch_job(capsys: pytest.CaptureFixture[str]) -> None:
    job = written(KINDS["pytorchjob"], capsys)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: spec["replicas"] for kind, spec in replicas.items()} == {"Master": 1, "Worker": 2}
    command = replicas["Worker"]["template"]["spec"]["containers"][0]["command"]
    # The operator's environment of the second worker.
    environ = {
        "PET_NODE_RANK": "2",
        "RANK": "2",
        "PET_NNODES": "3",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "my-run-master-0",
    }
    environ |= {"MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "PET_MASTER_ADDR": "my-run-master-0"}
    assert find_nodes(launch_of(command), environ) == Nodes(3, 2, "my-run-master-0", 23456, "none")
    env = worker_env(environ, 8, cpu_cores=1, device_available=True)
    assert not [name for name in env if name.startswith("PET_")], "torchrun would take them for its own flags"
    alone = written([*KINDS["pytorchjob"], "--node", "1"], capsys)
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert find_nodes(LaunchConfig(num_nodes=1), environ | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}).port is None


def test_vertex(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = written(KINDS["vertex"], capsys)
    first, others = spec["workerPoolSpecs"]
    assert (first["replicaCount"], others["replicaCount"]) == (1, 2)
    assert (
        first["machineSpec"]["acceleratorType"] == "NVIDIA_H100_80GB" and first["machineSpec"]["acceleratorCount"] == 8
    )
    assert first["nfsMounts"] == [{"server": "10.0.0.2", "path": "/share", "mountPoint": "x"}]
    pools = {"workerpool0": ["w0-a-0:2222"], "workerpool1": ["w1-a-0:2222", "w1-a-1:2222"]}
    launch = launch_of(others["containerSpec"]["command"])
    for rank, (pool, index) in enumerate([("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1)]):
        described = {"cluster": pools, "environment": "cloud", "task": {"type": pool, "index": index}}
        found = find_nodes(launch, {"CLUSTER_SPEC": json.dumps(described)})
        assert found == Nodes(3, rank, "w0-a-0", 2222, "none")
    # Without --save-dir, checkpoints go where Vertex AI says.
    without = [text for text in KINDS["vertex"] if text not in ("--save-dir", "/mnt/nfs/x/runs")]
    assert "save_dir is missing" in refused(without, capsys)
    output = {"baseOutputDirectory": {"outputUriPrefix": "gs://b/out"}}
    spec = written(
        [*without, *options(tmp_path, {"spec": output, "pool": {"diskSpec": {"bootDiskSizeGb": 500}}})], capsys
    )
    assert spec["workerPoolSpecs"][1]["diskSpec"] == {"bootDiskSizeGb": 500}
    assert "--save-dir" not in spec["workerPoolSpecs"][0]["containerSpec"]["command"]
    message = refused([*KINDS["vertex"], "--volume", "claim:/data"], capsys)
    assert "Vertex AI mounts nfs://…" in message


def test_checkpoints_go_where_vertex_says() -> None:
    environ = {"AIP_CHECKPOINT_DIR": "gs://bucket/out/checkpoints/"}
    assert with_save_dir(load_run_config(), environ).run_dir == Path("/gcs/bucket/out/checkpoints/run")
    given = load_run_config(overrides=["checkpoint.save_dir=/runs"])
    assert with_save_dir(given, environ) == given
    assert with_save_dir(load_run_config(), {}).checkpoint.save_dir is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_containers_run_what_was_typed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, overrides and flags become one command line; `$(…)` in it is not Kubernetes' to replace."""
    monkeypatch.chdir(tmp_path)
    content = {"model": {"unfreeze": ["a.*", "b.*"]}, "optimizer": {"lr": 3e-5, "weight_decay": 0.1}}
    content |= {
        "training": {"seed": 7, "deterministic": True},
        "logging": {"wandb_project": "a b $(HOME)", "wandb": True},
    }
    Path("run.yaml").write_text(yaml.safe_dump(content))
    argv = [*KINDS[kind], "--config", "run.yaml", "--lr", "1e-5", "training.seed=8", "--flash-attn", "--mlflow"]
    job = written(argv, capsys)
    container = job["workerPoolSpecs"][0]["containerSpec"] if kind == "vertex" else pod_of(job)["spec"]["containers"][0]
    command = [text if kind == "vertex" else text.replace("$$(", "$(") for text in container["command"]]
    run = parse_command_line(command[command.index("llava_mcore") + 2 :], "run.py").load()
    typed = parse_command_line(argv, "run.py").load()
    for name in type(typed).model_fields:
        if name != "launch":
            assert getattr(run, name) == getattr(typed, name), name
    assert (run.optimizer.lr, run.training.seed, run.logging.wandb_project) == (1e-5, 8, "a b $(HOME)")
    assert (run.launch.k8s, run.launch.vertex, run.launch.image, run.launch.volumes) == (None, None, None, ())


def test_further_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options are merged into the manifest: fields, and items of lists by their names."""
    further = {
        "metadata": {"namespace": "ml", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
        "spec": {"failurePolicy": {"maxRestarts": 100}},
        "pod_metadata": {"annotations": {"a": "b"}},
        "pod": {
            "nodeSelector": {"gpu": "h100"},
            "volumes": [
                {"name": "shared-memory", "emptyDir": {"sizeLimit": "64Gi"}},
                {"name": "cache", "emptyDir": {}},
            ],
        },
        "container": {
            "resources": {"limits": {"rdma/hca": 8}},
            "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        },
    }
    job = written([*KINDS["jobset"], *options(tmp_path, further)], capsys)
    pod = pod_of(job)
    assert job["metadata"] == {"name": "my-run", **further["metadata"]} and pod["metadata"] == further["pod_metadata"]
    assert job["spec"]["failurePolicy"]["maxRestarts"] == 100 and job["spec"]["failurePolicy"]["rules"]
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 8}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"} and "cache" in volumes
    assert "/cache" in [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]
    # A mount of the options counts as a place for the run's files.
    moved = [text.replace("/runs", "/cache") if text == "/runs" else text for text in KINDS["jobset"]]
    written([*moved, *options(tmp_path, further)], capsys)
    assert "no section 'pods' in this job: use metadata" in refused(
        [*KINDS["jobset"], *options(tmp_path, {"pods": {}})], capsys
    )
    assert merged({"a": [1], "b": {"c": 1}}, {"a": [2], "b": {"d": 2}}) == {"a": [2], "b": {"c": 1, "d": 2}}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--k8s", "jobset", "-g", "8"], "--k8s needs a container image"),
        (["--k8s", "jobset", "--image", "x"], "give -g"),
        (["--k8s", "jobset", "--image", "x", "-g", "1", "--vertex", "m"], "give one of them"),
        (["--k8s", "jobset", "--image", "x", "-g", "1", "--sif-path", "i.sif"], "--sif-path has no effect with --k8s"),
        (["--vertex", "m", "--image", "x", "-g", "1", "--rank", "0"], "--rank has no effect with --vertex"),
        ([*KINDS["jobset"], "--save-dir", "runs"], "--save-dir runs: give the absolute path in the container"),
        (
            [*KINDS["jobset"], "--save-dir", "/home"],
            "/home: in no volume of the container, of which it has /data, /runs",
        ),
        ([*KINDS["jobset"], "--name", "9" * 50], "has to begin with a letter"),
        ([*KINDS["jobset"], "--tp", "5"], "24 processes (--gpus) cannot be divided into groups of --tp 5"),
        ([*KINDS["jobset"], "--volume", "/x"], "expected CLAIM:/path"),
        (["--image", "x", "-g", "1"], "--image has no effect without --k8s or --vertex"),
    ],
)
def test_what_is_refused(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(argv, capsys)
    assert expected in message and "Traceback" not in message


def test_what_could_not_be_checked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*KINDS["jobset"], "--save"]) == 0
    notes = capsys.readouterr().err
    assert "not checked, because /data/m, /data/hf, /data/shards is not on this machine" in notes
    assert "it resumes only with --save-interval, --save-optim and --load-optim" in notes


def test_volumes() -> None:
    assert parse_volume("my-claim:/data/:ro") == Volume("my-claim", "/data", True)
    assert parse_volume("/mnt/disk:/data") == Volume("/mnt/disk", "/data", False)
    assert parse_volume("nfs://host/export/a:/data") == Volume("/export/a", "/data", False, "host")
    assert job_name("Llava_1.5 (a)") == "llava-1-5-a"


def test_what_the_environment_cannot_mean() -> None:
    assert read_cluster({}) is None
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX: expected a number"):
        read_cluster({"JOB_COMPLETION_INDEX": "x"})
    for text in ("", "[]", '{"cluster": {}, "task": {"type": "workerpool0", "index": 0}}'):
        with pytest.raises(ConfigError, match="CLUSTER_SPEC"):
            read_cluster({"CLUSTER_SPEC": text})
    with pytest.raises(ConfigError, match="--node 2: by PET_NODE_RANK, this job has 4 machines"):
        find_nodes(LaunchConfig(num_nodes=2), {"PET_NODE_RANK": "0", "PET_NNODES": "4", "PET_MASTER_ADDR": "a"})
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX 5 is not below --node 2"):
        find_nodes(LaunchConfig(num_nodes=2, master_addr="a"), {"JOB_COMPLETION_INDEX": "5"})
    # An indexed Job whose pods are runs of their own.
    assert find_nodes(LaunchConfig(), {"JOB_COMPLETION_INDEX": "5"}).count == 1


def test_submit(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [text for text in KINDS["jobset"] if text != "--dry-run"]
    assert train.main(argv) == 0
    assert (
        "wrote My_run.jobset.yaml; start it with: kubectl create --filename My_run.jobset.yaml"
        in capsys.readouterr().out
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "--submit needs kubectl on PATH; My_run.jobset.yaml was written" in refused([*argv, "--submit"], capsys)
    (tmp_path / "kubectl").write_text('#!/bin/sh\n[ -f "$3" ] && echo "$1 $2 $3" || exit 1\n')
    (tmp_path / "kubectl").chmod(stat.S_IRWXU)
    assert train.main([*argv, "--submit"]) == 0
    assert capsys.readouterr().out == "create --filename My_run.jobset.yaml\n"
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'no such kind' >&2\nexit 1\n")
    assert "kubectl refused My_run.jobset.yaml: no such kind" in refused([*argv, "--submit"], capsys)


def test_exit_codes_that_a_pytorch_job_retries(tmp_path: Path) -> None:
    """128 and more restart a pod: all but success, mistakes and failed trainings."""
    for code, expected in {0: 0, 2: 2, 3: 3, 1: 143, 75: 143, 124: 143, 137: 137}.items():
        done = subprocess.run(["bash", "-c", RETRIED, "train", "bash", "-c", f"exit {code}"], check=False)
        assert done.returncode == expected, code
    script = (
        f"trap 'sleep 0.3; touch {tmp_path}/saved; exit 75' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done"
    )
    process = subprocess.Popen(["bash", "-c", RETRIED, "train", "bash", "-c", script])
    try:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143
    finally:
        process.kill()
    assert (tmp_path / "saved").exists()


def test_arguments_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {unfreeze: ['a,b']}\n")
    line = parse_command_line(["--config", str(tmp_path / "run.yaml")], "run.py")
    with pytest.raises(ConfigError, match="what it says in model cannot be written as arguments"):
        job_arguments(line)
