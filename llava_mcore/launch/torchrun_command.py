"""The command line and the environment of the worker processes on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from llava_mcore.launch.nodes import ONE_MACHINE, Nodes
from llava_mcore.launch.singularity import REPOSITORY


def torchrun_argv(num_processes: int, module: str, arguments: Sequence[str], nodes: Nodes = ONE_MACHINE) -> list[str]:
    """Return the command that runs `python -m module arguments` as `num_processes` ranks of this machine."""
    return [
        sys.executable,
        *("-m", "llava_mcore.run.torchrun"),  # torch.distributed.run with a shorter last word
        *_meeting(nodes),
        *("--nproc-per-node", str(num_processes)),
        *("-m", module),
        *arguments,
    ]


def _meeting(nodes: Nodes) -> list[str]:
    """Return how the processes find each other.

    On one machine the address is given because looking up the machine's own name fails without a name service.
    """
    if nodes.count == 1 and nodes.port is None:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    return [
        *("--nnodes", str(nodes.count)),
        *("--node-rank", str(nodes.rank)),
        *("--rdzv-id", nodes.run_id),
        *("--master-addr", nodes.master_addr),
        *("--master-port", str(nodes.port)),
    ]


ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Torch's setting of its memory allocators, and its older name."""
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""The number of pictures differs from batch to batch, and with it the size of tensors: without segments that grow, much
of a GPU's memory is lost between them. The host memory that a save in the background is copied to is made ready for
the GPU by eight threads: one takes more than twice as long, while the training waits."""
LAUNCH_QUEUES = ("CUDA_SCALE_LAUNCH_QUEUES", "4x")
"""CUDA lets the host be about a thousand kernels ahead. The backward pass of a vision tower alone has as many,
short ones, after which the host would be late with the next forward pass."""


def worker_env(
    environ: Mapping[str, str],
    num_processes: int,
    *,
    cpu_cores: int,
    device_available: bool,
    interface: str | None = None,
    gpu_ids: Sequence[int] = (),
) -> dict[str, str]:
    """Return the environment of the workers: all of `environ`, our package on PYTHONPATH, and settings that are unset.

    A checkout that was not installed works from every folder that way.
    On the CPU the ranks share the cores; beside a GPU one thread is enough, and torchrun says so in a warning.
    `gpu_ids` number the GPUs that `environ` shows, all if empty.
    """
    threads = 1 if device_available else max(1, cpu_cores // num_processes)
    python_path = os.pathsep.join([str(REPOSITORY), *filter(None, [environ.get("PYTHONPATH")])])
    env = {"OMP_NUM_THREADS": str(threads), **environ, "PYTHONPATH": python_path}
    if device_available:
        env.setdefault(*LAUNCH_QUEUES)
        if not any(name in environ for name in ALLOCATOR_NAMES):
            env[ALLOCATOR_NAMES[0]] = ALLOCATOR
    if interface is not None:
        env |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    if gpu_ids:
        shown = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(shown[i] if shown else str(i) for i in gpu_ids)
    return env
