"""torchrun whose last word is ours: its own report of a failed worker would bury the worker's message."""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> int:
    """Run torchrun's command line; return 0, or the exit code of the first worker that failed (128 + n: signal n)."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:
            name = signal.Signals(-first.exitcode).name
            print(f"error: rank {rank} was ended by {name}; all ranks were stopped", file=sys.stderr)
            return 128 - first.exitcode
        print(f"all ranks were stopped: rank {rank} ended with exit code {first.exitcode}", file=sys.stderr)
        return first.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
