"""Shared by all commands except training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from llava_mcore.compat.tested import untested_line
from llava_mcore.run.messages import with_messages


def conversion_main(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: Sequence[str]
) -> int:
    """Parse, run, and turn errors into one message and an exit code. Warns about untested versions first."""

    def parse_and_run() -> int:
        args = parser.parse_args(argv)
        untested = untested_line()
        if untested is not None:
            print(f"warning: {untested}", file=sys.stderr)
        return run(args)

    return with_messages(parse_and_run)
