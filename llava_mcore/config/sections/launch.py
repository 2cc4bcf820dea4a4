"""Configuration of launching: machines, GPUs, container, and jobs of SLURM, Kubernetes and Vertex AI."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from llava_mcore.config.sections.base import Flag, Needs, Parts, Section, UserPath, comma_separated


def _gpu_count(value: int) -> int:
    if value == 0:
        raise ValueError("expected -1 (all GPUs) or a number of processes from 1")
    return value


def _gpu_ids(value: str) -> str:
    """Return '0,2' for '0, 2'."""
    ids = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in ids) or len({int(part) for part in ids}) != len(ids):
        raise ValueError("expected numbers of GPUs such as 0,1,3, each once")
    return ",".join(ids)


@dataclass(frozen=True)
class Volume:
    """One `SOURCE:/path[:ro]` of --volume.

    Attributes:
        source: a claim's name, a folder of the machine, or the export of an NFS server.
        server: that server, else None.
    """

    source: str
    path: str
    read_only: bool
    server: str | None = None


_VOLUME = re.compile(
    r"(?:nfs://(?P<server>[^/:]+)(?P<export>/[^:]*)|(?P<folder>/[^:]*)|(?P<claim>[a-z0-9]([a-z0-9.-]*[a-z0-9])?))"
    r":(?P<path>/[^:]+?)/?(?P<read_only>:ro)?"
)


def parse_volume(text: str) -> Volume:
    """Return the volume that a text names. ValueError for anything else."""
    match = _VOLUME.fullmatch(text)
    if match is None:
        raise ValueError(
            "expected CLAIM:/path, /host/folder:/path or nfs://SERVER/EXPORT:/path, each perhaps with :ro at its end"
        )
    source = match["export"] or match["folder"] or match["claim"]
    return Volume(source, match["path"], match["read_only"] is not None, match["server"])


def _volume_text(text: str) -> str:
    parse_volume(text)
    return text


GpuCount = Annotated[int, Field(ge=-1, le=1024), AfterValidator(_gpu_count)]
GpuIds = Annotated[str, AfterValidator(_gpu_ids)]
Volumes = Annotated[tuple[Annotated[str, AfterValidator(_volume_text)], ...], BeforeValidator(comma_separated)]
_JOB = Needs("launch.k8s", "launch.vertex")


class LaunchConfig(Section):
    """How the processes are started."""

    num_gpus: Annotated[GpuCount, Flag("--gpus", aliases=("-g",), group="GPU")] = -1
    """GPUs to use on each node, one process each; -1 means all. On a machine without GPUs: gloo processes, and -1 means
    1."""
    gpu_ids: Annotated[GpuIds | None, Flag("--gpu-ids", group="GPU")] = None
    """GPUs to use, such as 0,1,3, among those that this process sees. Default: the first ones."""
    num_nodes: Annotated[Parts | None, Flag("--node", group="several machines")] = None
    """Number of machines; each of them starts the same command. Default: SLURM's, else 1."""
    node_rank: Annotated[int | None, Flag("--rank", aliases=("-r",), group="several machines")] = Field(
        None, ge=0, le=10**5
    )
    """Rank of this machine, from 0. Default: SLURM's."""
    master_addr: Annotated[str | None, Flag("--master-addr", aliases=("-m",), group="several machines")] = None
    """Name or address of the first machine. Default: SLURM's first node."""
    master_port: Annotated[
        int | None,
        Flag(
            "--master-port",
            aliases=("--rdzv-port", "-p"),
            group="several machines",
        ),
    ] = Field(None, ge=1, le=65535)
    """Rendezvous port on the first machine; two runs on one machine need two. Default: any free port on one machine,
    20000 + job id modulo 10000 under SLURM, else 29500."""
    interface: Annotated[str | None, Flag("--interface", group="several machines")] = None
    """Network interface for communication, such as eth0. Default: NCCL's and gloo's own choice."""
    slurm_job_id: Annotated[str | None, Flag("--slurm-job-id", group="SLURM")] = None
    """Id of the SLURM job, which determines the rendezvous name and port. Default: SLURM's."""
    slurm_output_name: Annotated[str | None, Flag("--slurm-output-name", group="SLURM")] = None
    """Output file of a job that --submit submits. Default: SAVE_DIR/NAME/slurm-%j.out."""
    sbatch_options: Annotated[str | None, Flag("--sbatch-options", group="SLURM")] = None
    """More sbatch options for a job that --submit submits, such as '--partition=gpu --time=24:00:00'."""
    sif_path: Annotated[UserPath | None, Flag("--sif-path", group="save and load")] = None
    """Singularity/Apptainer image inside which to run the same command."""
    k8s: Annotated[Literal["jobset", "pytorchjob"] | None, Flag("--k8s", group="Kubernetes and Vertex AI")] = None
    """Write a Kubernetes manifest for the run, NAME.KIND.yaml, and start nothing here: a JobSet, or a PyTorchJob for
    Kubeflow's training operator. --submit also creates it with kubectl."""
    vertex: Annotated[str | None, Flag("--vertex", group="Kubernetes and Vertex AI")] = None
    """Write NAME.vertex.yaml, a Vertex AI custom job on machines of this type, such as a3-highgpu-8g, and start
    nothing here; --submit also creates it with gcloud."""
    image: Annotated[str | None, Flag("--image", group="Kubernetes and Vertex AI"), _JOB] = None
    """Container image of the job, such as one built from environments/Dockerfile."""
    volumes: Annotated[Volumes, Flag("--volume", group="Kubernetes and Vertex AI", many=True), _JOB] = ()
    """Volumes of the container, as CLAIM:/path, /host/folder:/path or nfs://SERVER/EXPORT:/path; :ro at the end makes
    it read-only. All paths of the run are paths in the container."""
    job_options: Annotated[UserPath | None, Flag("--job-options", group="Kubernetes and Vertex AI"), _JOB] = None
    """YAML file with more fields for the job, by section: metadata, spec, pod_metadata, pod and container for
    Kubernetes; spec, pool and container for Vertex AI."""

    @property
    def chosen_gpus(self) -> tuple[int, ...]:
        """Return the indices in `gpu_ids`; empty if not given."""
        return tuple(int(part) for part in self.gpu_ids.split(",")) if self.gpu_ids else ()
