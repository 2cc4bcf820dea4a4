"""A world of processes on this machine that a command starts for its own computation."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from llava_mcore.errors import CheckpointError
from llava_mcore.processes.forkserver import PRELOADED, end_with_parent, start_forkserver, without_interrupts

"""Imported first by the server that forks the processes, then what they run: once for all of them."""


def run_world(function: Callable[..., None], num_processes: int, *arguments: Any, on_gpus: bool = False) -> None:
    """Run `function(rank, num_processes, port, *arguments)` in every process; it calls `enter` first.

    Ctrl-C and SIGTERM are for this process alone, which ends the others.

    Raises:
        CheckpointError: a process failed.
    """
    before, handler = multiprocessing.active_children(), signal.signal(signal.SIGTERM, _terminate)
    # Open while they need it, so that no other program can take the port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process_arguments = (num_processes, store.port, *arguments)
    try:
        context = _start(function, process_arguments, num_processes, on_gpus=on_gpus)
        while not context.join():
            pass
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise CheckpointError(f"the parallel model could not run: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()


def _terminate(signal_number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + signal_number)  # cleans up, as Ctrl-C does


def _start(function: Callable[..., None], arguments: tuple[Any, ...], size: int, *, on_gpus: bool) -> ProcessContext:
    if on_gpus:  # a process that has looked for GPUs must not be forked
        with without_interrupts():
            return start_processes(function, arguments, nprocs=size, join=False, start_method="spawn")
    start_forkserver(PRELOADED, function.__module__)
    return start_processes(function, arguments, nprocs=size, join=False, start_method="forkserver")


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
    end_with_parent()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // num_processes, 1))
