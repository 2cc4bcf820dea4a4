"""What a loader process does before it reads: forget what belongs to the training process, and outlive its signals."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

from megatron.energon.wrappers.gc_dataset import gc_init_worker

from llava_mcore.data.remote import renew_connections


def start_loader_process(worker: int) -> None:
    """The first thing that a loader process does."""
    _outlive_stop_signals()
    renew_connections()
    gc_init_worker(worker)
    # What the training process has made is not searched for garbage, and its pages stay shared.
    gc.freeze()


def _outlive_stop_signals() -> None:
    """Let only the training process end this one.

    SLURM sends its signals to every process of a job. Without its loader processes a run could not finish the iteration
    that it saves after. torch ends a loader process by SIGTERM, so that one counts if the training process sent it.
    When that one is gone, torch's own watch over it ends this one. Only Linux tells the sender; elsewhere nothing
    changes.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # of all threads that begin after this
    threading.Thread(target=_end_when_parent_asks, args=(os.getppid(),), name="sigterm", daemon=True).start()


def _end_when_parent_asks(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
