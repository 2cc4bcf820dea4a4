"""What a loader process does before it reads: forget what belongs to the training process, outlive its signals, and end
with it."""

from __future__ import annotations

import functools
import gc
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from megatron.energon.wrappers.gc_dataset import gc_init_worker

from llava_mcore.data.storage.open_shards import OPEN_SHARDS
from llava_mcore.data.storage.remote import renew_connections
from llava_mcore.parent import die_with_parent

OPEN_FILES = Path("/proc/self/fd")
_SECONDS_BETWEEN_LOOKS = 1.0


def loader_process_init() -> Callable[[int], None]:
    """Return the first thing that a loader process of this process does: torch's worker_init_fn."""
    return functools.partial(_start, os.getpid())


def _start(parent: int, worker: int) -> None:
    die_with_parent(signal.SIGKILL, parent)
    _leave_sockets()
    _outlive_stop_signals(parent)
    renew_connections()
    OPEN_SHARDS.close_all()  # remote ones would go on with the training process's connections
    gc_init_worker(worker)
    # What the training process has made is not searched for garbage, and its pages stay shared.
    gc.freeze()


def _leave_sockets() -> None:
    """Let go of the sockets that the training process had open when it was forked.

    The other ranks notice that a rank is gone when the last copy of its sockets is closed. The numbers stay in use, by
    nothing, because objects that came along with the fork may still close them.
    """
    if not OPEN_FILES.is_dir():
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(entry.name) for entry in OPEN_FILES.iterdir()]:
        if number > 2 and _is_socket(number):  # 0 to 2 are the console, whatever it is
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # that of the listing itself
        return False


def _outlive_stop_signals(parent: int) -> None:
    """Let only the training process end this one.

    SLURM sends its signals to every process of a job. Without its loader processes a run could not finish the iteration
    that it saves after. torch ends a loader process by SIGTERM, so that one counts if the training process sent it.
    Only Linux tells the sender; elsewhere nothing changes.
    """
    signal.set_wakeup_fd(-1)  # the pipe through which the training process learns of its own signals
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # of all threads that begin after this
    threading.Thread(target=_end_with, args=(parent,), name="sigterm", daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when the parent says so, or is gone.

    torch's own watch over the parent leaves its loop, and then waits for what it has queued to be read: for ever.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait([signal.SIGTERM], _SECONDS_BETWEEN_LOOKS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
