"""torchrun whose last word is ours: its own report of a failed worker would bury the worker's message."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from llava_mcore.apps.cli import with_messages
from llava_mcore.launch.process import STOP, STOPPED_EARLY, leave


def main() -> int:
    """Run torchrun's command line; return 0, or the exit code of the first worker that failed (128 + n: signal n)."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    args = parse_args(sys.argv[1:])
    # torchrun would give the ranks 30 seconds after these, whatever they have to save.
    args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    for number in (signal.SIGTERM, STOP):
        signal.signal(number, lambda *_: ask_workers_to_stop(args.training_script))
    try:
        run(args)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:
            name = signal.Signals(-first.exitcode).name
            print(f"error: rank {rank} was ended by {name}; all ranks were stopped", file=sys.stderr)
            return 128 - first.exitcode
        if first.exitcode == STOPPED_EARLY:
            return first.exitcode
        print(f"all ranks were stopped: rank {rank} ended with exit code {first.exitcode}", file=sys.stderr)
        return first.exitcode
    return 0


def ask_workers_to_stop(module: str) -> None:
    """Ask every rank on this machine to save and end."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                child.send_signal(STOP)


if __name__ == "__main__":
    leave(with_messages(main))  # it makes a temporary folder
