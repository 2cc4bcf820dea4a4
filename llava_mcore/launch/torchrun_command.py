"""The command line and the environment of the worker processes on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from llava_mcore.launch.checkout import python_path
from llava_mcore.launch.nodes import ONE_MACHINE, Nodes

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables for torch's memory allocators: the current and the older name."""
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""The number of images, and so the size of tensors, differs from batch to batch: without expandable segments much of
a GPU's memory is lost to fragmentation. Eight threads pin the host memory for saves in the background: one takes more
than twice as long."""
LAUNCH_QUEUES = ("CUDA_SCALE_LAUNCH_QUEUES", "4x")
"""CUDA lets the host queue about a thousand kernels. The backward pass of a vision tower alone has as many short ones,
after which the host would be late with the next forward pass."""
GRAPH_REGISTER = ("NCCL_GRAPH_REGISTER", "0")
"""Otherwise NCCL registers the memory of messages that CUDA graphs capture. megatron-core 0.19.2 refuses graphs with
that and expandable segments, because of illegal memory accesses."""


def torchrun_argv(num_processes: int, module: str, arguments: Sequence[str], nodes: Nodes = ONE_MACHINE) -> list[str]:
    """Return the command that runs `python -m module arguments` as `num_processes` ranks of this machine."""
    return [
        sys.executable,
        *("-m", "llava_mcore.launch.torchrun"),  # torch.distributed.run with a shorter shutdown
        *_meeting(nodes),
        *("--nproc-per-node", str(num_processes)),
        *("-m", module),
        *arguments,
    ]


def _meeting(nodes: Nodes) -> list[str]:
    """Return the options by which the processes find each other.

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


def worker_env(
    environ: Mapping[str, str],
    num_processes: int,
    *,
    cpu_cores: int,
    device_available: bool,
    interface: str | None = None,
    gpu_ids: Sequence[int] = (),
) -> dict[str, str]:
    """Return the environment of the workers: `environ`, our package on PYTHONPATH, and defaults for unset variables.

    With that, a checkout that is not installed works from every folder.
    On the CPU the ranks share the cores; with a GPU one thread is enough, and torchrun warns if it is not set.
    `gpu_ids` are indices of the GPUs that `environ` shows; empty means all.
    """
    # On every machine: threads, and a path from which our package can be imported.
    threads = 1 if device_available else max(1, cpu_cores // num_processes)
    env = {"OMP_NUM_THREADS": str(threads), **environ}
    # Kubeflow sets defaults for torchrun; remove them, since `_meeting` decides how the machines meet.
    env = {name: value for name, value in env.items() if not name.startswith("PET_")}
    path = python_path(environ.get("PYTHONPATH"))
    if path is not None:
        env["PYTHONPATH"] = path
    # Settings for GPUs; the constants at the top of this file explain them.
    if device_available:
        env.setdefault(*LAUNCH_QUEUES)
        env.setdefault(*GRAPH_REGISTER)
        if not any(name in environ for name in ALLOCATOR_NAMES):
            env[ALLOCATOR_NAMES[0]] = ALLOCATOR
    # Choices of the user: network interface and GPUs.
    if interface is not None:
        env |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    if gpu_ids:
        visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in gpu_ids)
    return env
