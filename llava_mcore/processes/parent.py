"""A process that ends when its parent ends. Needs only the standard library.

As a script it runs a command: `python -P parent.py PARENT_PID SIGNAL HELD COMMAND…`. Unlike preexec_fn, this is safe
in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(signal_number: signal.Signals, parent: int | None = None) -> None:
    """Ask the kernel to send us a signal when our parent ends. Does nothing on systems other than Linux.

    The kernel's parent is the thread that started us: start such processes from a long-lived thread.

    Args:
        parent: id of the process that started us. If it has already ended, we get the signal now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def tied_command(command: Sequence[str], signal_number: signal.Signals, *, held: bool = False) -> list[str]:
    """Return the command that runs another one, which gets a signal when this process ends.

    Args:
        held: whether it expects the signals that we block to stay blocked.
    """
    return [sys.executable, "-P", __file__, str(os.getpid()), str(int(signal_number)), str(int(held)), *command]


def main() -> None:
    """Become the command in the arguments; HELD is 1 if it expects its signals to be blocked, as ours are."""
    parent, signal_number, held, *command = sys.argv[1:]
    die_with_parent(signal.Signals(int(signal_number)), int(parent))
    if held == "0":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
