"""A world of processes on this machine that a command starts for its own computation."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from llava_mcore.errors import CheckpointError

PRELOADED = "llava_mcore.run.preload"
"""Imported first by the server that forks the processes, then what they run: once for all of them."""


def run_world(function: Callable[..., None], num_processes: int, *arguments: Any, on_gpus: bool = False) -> None:
    """Run `function(rank, num_processes, port, *arguments)` in every process; it calls `enter` first.

    Raises:
        CheckpointError: a process failed.
    """
    method = "spawn"  # a process that has looked for GPUs must not be forked
    if not on_gpus:
        method = "forkserver"
        multiprocessing.set_forkserver_preload([PRELOADED, function.__module__])
    # Open while they need it, so that no other program can take the port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (num_processes, store.port, *arguments)
    try:
        start_processes(function, given, nprocs=num_processes, start_method=method)
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise CheckpointError(f"the parallel model could not run: {error}") from error


def run_here(function: Callable[..., None], *arguments: Any) -> None:
    """Run `function` as the only rank in this process, whose world it is from then on."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    function(0, 1, store.port, *arguments)


def enter(rank: int, num_processes: int, port: int) -> None:
    """Describe the world to torch.distributed, and share the processor with the other processes.

    Args:
        port: port of a store on this machine, through which the processes find each other.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    # torch's setting for an existing store, like torchrun's; rank 0 does not open one.
    os.environ |= {"WORLD_SIZE": str(num_processes), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // num_processes, 1))
