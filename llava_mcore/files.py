"""Reading and writing small files so that what goes wrong names the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llava_mcore.errors import FileError


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let OSErrors of reads and writes within name a file, as those of opening it do."""
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
        raise FileError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start})") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that a text is. Raises FileError, which begins with `where`, for anything else."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise FileError(f"{where}: not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise FileError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileError(f"{where}: expected a JSON object, found {_kind(content)}")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        FileError: it holds anything else.
        OSError: it cannot be read.
    """
    return parse_object(read_text(path), str(path))


def _kind(content: object) -> str:
    return {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(content), "a number")
