"""Ends a rank that hangs, with the stacks of all its threads in SAVE_DIR/NAME/stacks/.

A rank that crashes in native code (SIGSEGV, SIGABRT, …) leaves its stacks there too.

All ranks start an iteration at the same time. When one hangs, the others wait for it, so all of them reach the timeout
together, and each writes its stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from llava_mcore.errors import HUNG

_LAST_RESORT = 15
"""Seconds after which the stacks are written without Python's help: a call that hangs may hold the interpreter lock."""


def stacks_file(run_dir: Path, rank: int) -> Path:
    """Return the file for the stacks of a rank."""
    return run_dir / "stacks" / f"rank_{rank:05d}.txt"


class Watchdog:
    """Ends this process when its current task takes too long. `begin` names the task and restarts the clock."""

    def __init__(self, seconds: float, run_dir: Path, rank: int) -> None:
        """Start watching.

        Args:
            run_dir: the run's folder. Stacks go to one file per rank, which `close` removes.
        """
        self.seconds, self.rank = seconds, rank
        self.path = stacks_file(run_dir, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._activity = ""
        faulthandler.enable(file=self._file, all_threads=True)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self.begin("starting")

    def begin(self, activity: str) -> None:
        """Name the current task and restart the clock."""
        faulthandler.dump_traceback_later(self.seconds + _LAST_RESORT, exit=True, file=self._file)
        with self._changed:
            self._activity, self._deadline = activity, time.monotonic() + self.seconds
            self._changed.notify()

    def write_stacks(self) -> None:
        """Write the stacks of all threads.

        Not from a signal handler: this thread must hold the interpreter lock. Without it the stacks change while they
        are read, and the process may crash (faulthandler.register does that).
        """
        with self._changed:
            if not self._file.closed:
                faulthandler.dump_traceback(file=self._file, all_threads=True)

    def close(self) -> None:
        """Stop watching and remove the file."""
        with self._changed:
            self._deadline = None
            self._changed.notify()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
            self._file.close()
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are still there
            self.path.parent.rmdir()

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._deadline is None:
                    self._changed.wait()
                    continue
                left = self._deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                self._end()

    def _end(self) -> None:
        self.write_stacks()
        with contextlib.suppress(OSError):  # nobody may read it any more
            print(
                f"error: rank {self.rank}: {self._activity} took more than {self.seconds:g} s (--timeout); "
                f"stacks: {self.path}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(HUNG)
