"""Reading and writing small files, with the file name in every error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from llava_mcore.errors import FileError


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to OSErrors of reads and writes, as `open` does."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def read_text(path: Path) -> str:
    """Return the text of a file. Raises FileError if it is not UTF-8, OSError if it cannot be read."""
    try:
        with naming(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
