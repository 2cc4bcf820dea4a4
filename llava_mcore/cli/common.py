"""The entry of a command: parse, run, report errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from llava_mcore.compat.startup import UNUSED_IMPORTS_HERE, skip_unused_imports
from llava_mcore.compat.tested import untested_line
from llava_mcore.processes.messages import with_messages


class CommandMain(Protocol):
    """Runs a command with arguments, by default those of the process, and returns its exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def command_main(
    parser: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    *,
    warns_of_versions: bool = True,
) -> CommandMain:
    """Return the entry of a command: it parses, runs, and turns errors into one message and an exit code.

    `parser` must not import torch, so that --help and a mistyped flag are answered at once.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        return with_messages(lambda: parse_and_run(sys.argv[1:] if argv is None else list(argv)))

    def parse_and_run(arguments: list[str]) -> int:
        args = parser().parse_args(arguments)
        untested = untested_line() if warns_of_versions else None
        if untested is not None:
            print(f"warning: {untested}", file=sys.stderr)
        return run(args)

    return main


def skip_unused_here(*, reads_media: bool = False) -> None:
    """Skip what libraries import and a conversion never uses: a third of a command's start.

    Args:
        reads_media: the command reads a picture or sound as training does (--logits), and Energon imports more.
    """
    skip_unused_imports(*() if reads_media else UNUSED_IMPORTS_HERE)
