"""Runs torchrun so that a failed run ends within seconds, with our own message last.

torchrun's own report of a failed worker would hide the worker's message, and it gives the remaining ranks half a minute
to end: one that hangs, or is stopped, takes all of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from llava_mcore.compat.torchrun import limit_closing
from llava_mcore.errors import HUNG
from llava_mcore.processes.control import ENDING, FORWARDED, STOP, STOPPED_EARLY, exit_now, with_messages
from llava_mcore.processes.watchdog import stacks_file

_SECONDS_TO_END = 3
"""Seconds until a rank is killed after another one has failed; its own limit is slightly shorter."""
_OTHER_LIMITS = {STOPPED_EARLY: 30, HUNG: 1}
"""The same after these exit codes: when a run stops early, ranks may still be closing their logs; when one hangs, they
have already timed out."""
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


class ProcessFailure(Protocol):
    """torchrun's record of a failed process. `exitcode`: -n if signal n ended it."""

    @property
    def exitcode(self) -> int: ...


class Run:
    """The workers of this machine and their failures."""

    def __init__(self) -> None:
        """Start handling signals in a separate thread: torchrun may be importing or waiting."""
        self.module = ""
        self.ended_by: signal.Signals | None = None
        self.first: dict[int, ProcessFailure] = {}
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # in all later threads; workers unblock them
        threading.Thread(target=self._attend, name="signals", daemon=True).start()

    def workers(self) -> list[psutil.Process]:
        """Return the ranks on this machine that are still running."""
        workers = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if self.module in child.cmdline():
                    workers.append(child)
        return workers

    def _attend(self) -> None:
        while True:
            signal_number = signal.Signals(signal.sigwait(FORWARDED))
            if signal_number in ENDING:
                self._end(signal_number)
            elif not self._send(STOP):
                os._exit(STOPPED_EARLY)  # nothing has started

    def _end(self, signal_number: signal.Signals) -> None:
        self.ended_by = signal_number
        if self._send(signal.SIGINT):
            time.sleep(_SECONDS_TO_END)  # torchrun notices sooner, and `main` ends
        os._exit(self.exit_code())  # the remaining workers are killed with us

    def exit_code(self) -> int:
        """Return the exit code of a run that a signal has ended; the launcher says so, and how the run continues."""
        assert self.ended_by is not None
        return 128 + self.ended_by

    def _send(self, signal_number: signal.Signals) -> bool:
        """Send a signal to all workers, if there are any."""
        workers = self.workers() if self.module else []
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal_number)
        return bool(workers)

    def seconds_to_end(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Record which ranks failed first, and return the seconds that the others have."""
        if not self.first:
            self.first.update(failures)
        codes = [failure.exitcode for failure in self.first.values()]
        return max((_OTHER_LIMITS.get(code, _SECONDS_TO_END) for code in codes), default=1)


def _is_error(code: int) -> bool:
    """Return whether a rank has ended with an error that it has printed: it was not stopped, and did not hang."""
    return code > 1 and code not in (*_OTHER_LIMITS, 128 + signal.SIGTERM)


def cause(first: Mapping[int, ProcessFailure], failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Return rank and exit code of the failure that caused the others.

    Ranks that lose their connection to a killed rank fail too, with code 1, perhaps before torchrun notices. A rank
    that ends with an error may crash instead while it closes its files: torch's writer does so on a full disk. Another
    rank then has the error's own code.

    Args:
        first: the ranks that had failed when torchrun noticed.
        failures: those and the ones that have failed since, or were killed.
    """
    if all(failure.exitcode in _CRASHES for failure in first.values()):
        with_error = {rank: failure for rank, failure in failures.items() if _is_error(failure.exitcode)}
        first = with_error or first

    def order(rank: int) -> tuple[int, int]:
        code = first[rank].exitcode
        if code in _CRASHES:
            return 2, rank
        return 0 if code < 0 else 1 if _is_error(code) else 4 if code == 1 else 3, rank

    rank = min(first, key=order)
    return rank, first[rank].exitcode


def main() -> int:
    """Run torchrun's command line; return 0, or the exit code of the first worker that failed (128 + n: signal n)."""
    attended = Run()
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    args = parse_args(sys.argv[1:])
    args.signals_to_handle = ",".join(ending.name for ending in ENDING)  # never arrive: they are blocked
    args.training_script_args += ["--parent", str(os.getpid())]
    limit_closing(api, attended.seconds_to_end)
    attended.module = args.training_script
    try:
        run(args)
    except ChildFailedError as error:
        if attended.ended_by is not None:
            return attended.exit_code()
        first = {rank: x for rank, x in error.failures.items() if x.local_rank in attended.first}
        rank, code = cause(first or error.failures, error.failures)
        return _print_cause(rank, code, _run_dir(args.training_script_args))
    return 0


def _run_dir(arguments: Sequence[str]) -> Path:
    """Return the folder of the run.yaml that the workers are given."""
    return Path(arguments[arguments.index("--config") + 1]).parent


def _print_cause(rank: int, code: int, run_dir: Path) -> int:
    """Print which rank ended the run and how, and where its stacks are; return the run's exit code."""
    if code < 0:
        name, stacks = signal.Signals(-code).name, stacks_file(run_dir, rank)
        where = f"; its stacks: {stacks}" if stacks.is_file() and stacks.stat().st_size else ""
        print(f"error: rank {rank} was ended by {name}; all ranks were stopped{where}", file=sys.stderr)
        return 128 - code
    if code != STOPPED_EARLY:
        print(f"all ranks were stopped: rank {rank} ended with exit code {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    exit_now(with_messages(main))  # it creates a temporary folder
