"""Start of a loader process: it drops resources of the training process, ignores its stop signals, and ends
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

from llava_mcore.compat.energon.storage_clients import remember_clients_at_forks
from llava_mcore.data.storage.remote import renew_connections
from llava_mcore.data.storage.tar_files import OPEN_SHARDS
from llava_mcore.processes.parent import die_with_parent

OPEN_FILES = Path("/proc/self/fd")
_SECONDS_BETWEEN_LOOKS = 1.0


def loader_process_init() -> Callable[[int], None]:
    """Return torch's worker_init_fn for loader processes of this process. Call it before they are forked."""
    remember_clients_at_forks()
    return functools.partial(_start, os.getpid())


def leave_out_of_collections() -> None:
    """Exclude what this process holds from garbage collections; call before a loader process is forked.

    It inherits all objects. Visiting them, as Energon does when it starts and Python in every full collection, writes
    to their memory pages and so copies them: seconds and hundreds of megabytes per process. Garbage is collected here
    at every call, because a forked process may crash if it frees an object with threads or connections, which it has
    not inherited.
    """
    gc.collect()
    _freeze_once()


@functools.cache
def _freeze_once() -> None:
    """Freeze at the first call: later ones would also keep closed loaders that are parts of reference cycles."""
    gc.freeze()


def _start(parent: int, worker: int) -> None:
    die_with_parent(signal.SIGKILL, parent)
    _leave_sockets()
    _outlive_stop_signals(parent)
    renew_connections()
    OPEN_SHARDS.close_all()  # remote ones would reuse the training process's connections
    gc_init_worker(worker)
    # Objects of the training process are excluded from garbage collection, so that their pages stay shared.
    gc.freeze()


def _leave_sockets() -> None:
    """Close the sockets that the training process had open when this process was forked.

    The other ranks notice that a rank has ended when the last copy of its sockets is closed. The descriptors stay open,
    on /dev/null, because inherited objects may still close them.
    """
    if not OPEN_FILES.is_dir():
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(entry.name) for entry in OPEN_FILES.iterdir()]:
        if descriptor > 2 and _is_socket(descriptor):  # 0 to 2 are standard input, output and error
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # the descriptor of the listing itself
        return False


def _outlive_stop_signals(parent: int) -> None:
    """Make only the training process able to end this one.

    SLURM sends its signals to every process of a job. Without its loader processes a run could not finish the iteration
    before it saves. torch ends a loader process by SIGTERM, which is accepted from the training process only. Only
    Linux reports the sender; on other systems nothing changes.
    """
    signal.set_wakeup_fd(-1)  # the pipe through which the training process learns of its own signals
    for signal_number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(signal_number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # in all later threads
    threading.Thread(target=_end_with, args=(parent,), name="sigterm", daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when the parent says so, or has ended.

    torch's own watchdog leaves its loop, and then waits forever for its queue to be read.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait([signal.SIGTERM], _SECONDS_BETWEEN_LOOKS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
