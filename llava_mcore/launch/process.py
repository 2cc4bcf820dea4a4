"""How our processes begin and end: children that go when we are told to or are gone, signals, the way out."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
STOP = signal.SIGUSR1
"""What asks a training process to save and end after the iteration that it is in."""
STOPPED_EARLY = 75
"""Exit code of a run that ended before its last iteration because it was asked to: EX_TEMPFAIL, "try again"."""
_LAST_SECONDS = 5
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run_child(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command, hand it the signals that we get, and return its exit code (128 + n if signal n ended it).

    The child has a session of its own: Ctrl-C in a terminal would else reach it twice, once by us. If we are
    killed outright it gets SIGTERM. `argv[0]` must be there: 1 is returned, after a traceback, if it is not.
    """
    pending: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            pending.append(number)
        else:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        # This file, run as a script, becomes the command: unlike preexec_fn, that is safe beside threads.
        child = subprocess.Popen(
            [sys.executable, __file__, *argv], env=None if env is None else dict(env), start_new_session=True
        )
        for number in pending:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


class StopSignals:
    """Notes that SIGUSR1 asked this process to save and end.

    torchrun hands a SIGTERM that it got on as SIGUSR1, and itself sends SIGTERM only to the ranks left when one
    has failed. These end soon after, but not before the SIGUSR1 that comes when every process was sent a SIGTERM.
    """

    def __init__(self) -> None:
        """Take over both signals; call it in the main thread."""
        self.asked = False
        signal.signal(STOP, self._ask)
        signal.signal(signal.SIGTERM, self._end_soon)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _end_soon(self, _number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            signal.setitimer(signal.ITIMER_REAL, _LAST_SECONDS)  # SIGALRM, which nobody handles, ends the process


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send us a signal when the process that started us ends. Only Linux can; else nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def leave(code: int) -> NoReturn:
    """End a process: exit handlers run and output is flushed, but the interpreter is not torn down.

    Two reasons. Freeing what torch and transformers brought in takes a launcher over a second. And in a process of a
    world a thread of gloo may hold the tensors of the last collective a moment longer than Python does; if it gives
    them back while the interpreter goes down, the process ends by SIGABRT, whatever its exit code was to be (pytorch's
    pull request 179291). Threads that still work are not waited for, unless their `join` is an exit handler.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    os.execvp(sys.argv[1], sys.argv[1:])
