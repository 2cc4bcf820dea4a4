"""Rules for jobs of Kubernetes and Vertex AI."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.flags import name_of
from llava_mcore.config.sections.launch import LaunchConfig

_FOR_OTHERS = ("sif_path", "gpu_ids", "node_rank", "master_addr", "slurm_job_id", "slurm_output_name", "sbatch_options")
"""Keys that only other kinds of starts use: here the image is --image, and each container finds its own rank."""


def check_job(launch: LaunchConfig) -> Iterator[str]:
    """Yield why no job for Kubernetes or Vertex AI can be written."""
    flag = "--k8s" if launch.k8s is not None else "--vertex"
    if launch.k8s is not None and launch.vertex is not None:
        yield "--k8s and --vertex write two kinds of jobs: give one of them"
    if launch.image is None:
        yield f"{flag} needs a container image with this program: give --image, built from environments/Dockerfile"
    if launch.num_gpus < 0:
        yield f"{flag} needs the number of GPUs per machine (with --backend gloo: of processes): give -g"
    for name in _FOR_OTHERS:
        if getattr(launch, name) is not None:
            yield f"{name_of(f'launch.{name}')} has no effect with {flag}: omit it"
