"""Shared by all commands except training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from llava_mcore.compat.startup import UNUSED_IMPORTS_HERE, skip_unused_imports
from llava_mcore.compat.tested import untested_line
from llava_mcore.processes.messages import with_messages


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


def skip_unused_here(*, reads_media: bool = False) -> None:
    """Skip what libraries import and a conversion never uses: a third of a command's start.

    Args:
        reads_media: the command reads a picture or sound as training does (--logits), and Energon imports more.
    """
    skip_unused_imports(*() if reads_media else UNUSED_IMPORTS_HERE)
