"""What the conversion commands share: the container hand-over and one message for every user error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from llava_mcore.compat.tested import untested_line
from llava_mcore.errors import LlavaMcoreError


def conversion_main(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: Sequence[str]
) -> int:
    """Parse, run, and turn a user's error into one message and exit code 2. Untested versions are said first."""
    try:
        args = parser.parse_args(argv)
        untested = untested_line()
        if untested is not None:
            print(f"warning: {untested}", file=sys.stderr)
        return run(args)
    except LlavaMcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
