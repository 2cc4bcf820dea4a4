"""The command line and the environment of the worker processes on one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from llava_mcore.launch.singularity import REPOSITORY


def torchrun_argv(num_processes: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `python -m module arguments` as `num_processes` ranks of this machine.

    The address is given because looking up the machine's own name fails on machines without a name service.
    """
    return [
        sys.executable,
        *("-m", "llava_mcore.apps.torchrun"),  # torch.distributed.run with a shorter last word
        "--standalone",
        *("--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(num_processes)),
        *("-m", module),
        *arguments,
    ]


def worker_env(
    environ: Mapping[str, str], num_processes: int, *, cpu_cores: int, device_available: bool
) -> dict[str, str]:
    """Return the environment of the workers: all of `environ`, our package on PYTHONPATH, and OMP_NUM_THREADS if unset.

    A checkout that was not installed works from every folder that way.
    On the CPU the ranks share the cores; beside a GPU one thread is enough, and torchrun says so in a warning.
    """
    threads = 1 if device_available else max(1, cpu_cores // num_processes)
    python_path = os.pathsep.join([str(REPOSITORY), *filter(None, [environ.get("PYTHONPATH")])])
    return {"OMP_NUM_THREADS": str(threads), **environ, "PYTHONPATH": python_path}
