"""The machines of a run and this machine's rank among them: from flags, else from SLURM or another scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llava_mcore.config.schema import LaunchConfig
from llava_mcore.errors import ConfigError, problems
from llava_mcore.launch.cluster_env import ClusterNode, read_cluster
from llava_mcore.launch.jobs.slurm import SlurmJob, default_port, first_address, read_job

DEFAULT_PORT = 29500
INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True)
class Nodes:
    """The machines of a run; `rank` is this one's number. `port` is None if any free port will do."""

    count: int
    rank: int
    master_addr: str
    port: int | None
    run_id: str


ONE_MACHINE = Nodes(count=1, rank=0, master_addr="127.0.0.1", port=None, run_id="none")


def find_nodes(launch: LaunchConfig, environ: Mapping[str, str]) -> Nodes:
    """Return the run's machines: from flags and files, else from SLURM, Kubernetes or Vertex AI, else one machine.

    Raises ConfigError with everything that is missing or that contradicts the scheduler.
    """
    job = read_job(environ)
    cluster = read_cluster(environ) if job is None else None
    errors = [] if job is None else _contradictions(launch, job)
    count = launch.num_nodes or (job.num_nodes if job else 1)
    rank = launch.node_rank if launch.node_rank is not None else (job.node_rank if job and job.num_nodes > 1 else None)
    address, port = launch.master_addr, launch.master_port
    if cluster is not None:
        count = launch.num_nodes or cluster.count or 1
        errors += _other_count(launch, cluster)
    if cluster is not None and count > 1:
        rank = cluster.rank if rank is None else rank
        address, port = address or cluster.master_addr, port or cluster.port
    if count > 1 and rank is None:
        errors.append(f"--node {count} needs this node's number: give --rank 0 on the first node, 1 on the next, …")
    if count > 1 and address is None and (job is None or job.num_nodes == 1):
        errors.append(f"--node {count} needs the first node's address: give --master-addr on every node")
    if count == 1 and launch.num_nodes is None and job is None and cluster is None:
        # With --node 1 they are allowed: a script may be used for any number of machines.
        alone = {"--rank": launch.node_rank, "--master-addr": address if launch.master_port is None else None}
        errors += [f"{flag} has no effect without --node: add it" for flag, value in alone.items() if value is not None]
    elif rank is not None and rank >= count:
        source = "--rank" if launch.node_rank is not None or cluster is None else cluster.source
        errors.append(f"{source} {rank} is not below --node {count}: ranks start at 0")
    if errors:
        raise ConfigError(problems("The nodes of the run are unclear", errors))
    if count > 1 and address is None and job is not None:
        address = first_address(job)
    job_id = launch.slurm_job_id or (job.job_id if job else None)
    if port is None and count > 1:
        port = default_port(job_id) if job_id else DEFAULT_PORT
    return Nodes(count, rank or 0, address or "127.0.0.1", port, job_id or "none")


def check_interface(launch: LaunchConfig) -> list[str]:
    """Return why `--interface` cannot be used on this machine."""
    name = launch.interface
    there = sorted(path.name for path in INTERFACES.iterdir()) if INTERFACES.is_dir() else []
    if name is None or not there or name in there:
        return []
    return [f"--interface {name}: this machine has no such network interface: use one of {', '.join(there)}"]


def check_gpu_ids(launch: LaunchConfig, gpu_count: int) -> list[str]:
    """Return why `--gpu-ids` cannot be used on this machine, which has `gpu_count` GPUs."""
    if launch.gpu_ids is None:
        return []
    if not gpu_count:
        return [f"--gpu-ids {launch.gpu_ids}: this machine has no GPU: omit the flag"]
    ids = launch.chosen_gpus
    errors = []
    if launch.num_gpus not in (-1, len(ids)):
        errors.append(
            f"--gpu-ids {launch.gpu_ids} names {len(ids)} GPUs, --gpus says {launch.num_gpus}: omit one of them"
        )
    if max(ids) >= gpu_count:
        errors.append(f"--gpu-ids {launch.gpu_ids}: this machine shows {gpu_count}, numbered 0 to {gpu_count - 1}")
    return errors


def _other_count(launch: LaunchConfig, cluster: ClusterNode) -> list[str]:
    """Return a problem if --node differs from the number of machines that the scheduler started."""
    if launch.num_nodes in (None, 1) or cluster.count in (None, launch.num_nodes):
        return []
    return [f"--node {launch.num_nodes}: by {cluster.source}, this job has {cluster.count} machines: omit the flag"]


def _contradictions(launch: LaunchConfig, job: SlurmJob) -> list[str]:
    """Return what is wrong with how the job was started."""
    errors = []
    if job.num_tasks > job.num_nodes:
        errors.append(
            f"SLURM started train {job.num_tasks} times on {job.num_nodes} nodes, and each starts all processes of "
            "its node: use srun --ntasks-per-node=1"
        )
    if job.num_nodes == 1 and job.job_nodes > 1 and launch.num_nodes is None:
        errors.append(
            f"SLURM job {job.job_id} has {job.job_nodes} nodes and train was started on only one of them: start it "
            "with srun --ntasks-per-node=1, as scripts/slurm/train.sbatch does, or pass --node 1"
        )
    if job.num_nodes > 1 and launch.num_nodes not in (None, job.num_nodes):
        errors.append(f"--node {launch.num_nodes}: SLURM started train on {job.num_nodes} nodes: omit the flag")
    return errors
