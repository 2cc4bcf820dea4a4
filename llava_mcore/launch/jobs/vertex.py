"""Custom jobs of Vertex AI: the file for `gcloud ai custom-jobs create --config`.

The first machine is worker pool 0, the others are pool 1. Each finds its rank and the first one's address in
CLUSTER_SPEC (`launch/cluster_env.py`).
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from llava_mcore.errors import ConfigError, problems
from llava_mcore.launch.jobs.kubernetes import ClusterJob
from llava_mcore.launch.jobs.options import merged
from llava_mcore.launch.jobs.volumes import NFS_ON_VERTEX

SECTIONS = ("spec", "pool", "container")
"""Sections of --job-options: the job's spec, and those of every worker pool and its container."""
BUCKETS = "/gcs"
"""Folder in which Vertex AI mounts Cloud Storage."""
ACCELERATORS = {
    "a2-highgpu": "NVIDIA_TESLA_A100",
    "a2-megagpu": "NVIDIA_TESLA_A100",
    "a2-ultragpu": "NVIDIA_A100_80GB",
    "a3-highgpu": "NVIDIA_H100_80GB",
    "a3-megagpu": "NVIDIA_H100_MEGA_80GB",
    "a3-ultragpu": "NVIDIA_H200_141GB",
    "g2-standard": "NVIDIA_L4",
}
"""Machine types by their beginning -> Vertex AI's name of their GPUs."""


def custom_job(job: ClusterJob, machine_type: str) -> dict[str, Any]:
    """Return a CustomJobSpec.

    Raises:
        ConfigError: Vertex AI cannot mount one of the volumes.
    """
    container = merged({"imageUri": job.image, "command": job.command}, job.options.get("container", {}))
    pool: dict[str, Any] = {
        "machineSpec": _machine(machine_type, job.gpus),
        "replicaCount": 1,
        "containerSpec": container,
    }
    mounts = _nfs_mounts(job)
    if mounts:
        pool["nfsMounts"] = mounts
    pool = merged(pool, job.options.get("pool", {}))
    pools = [pool]
    if job.num_nodes > 1:
        pools.append(pool | {"replicaCount": job.num_nodes - 1})
    # When a machine is replaced, all start again and resume from the same checkpoint.
    spec = {"workerPoolSpecs": pools, "scheduling": {"restartJobOnWorkerRestart": True}}
    return merged(spec, job.options.get("spec", {}))


def output_folder(spec: dict[str, Any]) -> Path | None:
    """Return the folder of checkpoints that Vertex AI derives from a job's baseOutputDirectory, where it mounts it."""
    url = spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "")
    return Path(BUCKETS, url.removeprefix("gs://"), "checkpoints") if url.startswith("gs://") else None


def _machine(machine_type: str, gpus: int) -> dict[str, Any]:
    machine: dict[str, Any] = {"machineType": machine_type}
    kind = next((name for start, name in ACCELERATORS.items() if machine_type.startswith(f"{start}-")), None)
    if gpus and kind is not None:  # for other machines, --job-options names the GPUs
        machine |= {"acceleratorType": kind, "acceleratorCount": gpus}
    return machine


def _nfs_mounts(job: ClusterJob) -> list[dict[str, str]]:
    errors, mounts = [], []
    for volume in job.volumes:
        path = PurePosixPath(volume.path)
        if volume.server is None:
            errors.append(
                f"--volume {volume.source}:{volume.path}: Vertex AI mounts nfs://… and, in /gcs, buckets only"
            )
        elif path.parent != NFS_ON_VERTEX:
            errors.append(f"--volume …:{volume.path}: Vertex AI mounts NFS as {NFS_ON_VERTEX}/NAME: use such a path")
        elif volume.read_only:
            errors.append(f"--volume …:{volume.path}:ro: Vertex AI mounts NFS for writing too: omit :ro")
        else:
            mounts.append({"server": volume.server, "path": volume.source, "mountPoint": path.name})
    if errors:
        raise ConfigError(problems("The volumes cannot be mounted", errors))
    return mounts
