"""The one reader of JSON files that others may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llava_mcore.errors import FileError, LlavaMcoreError
from llava_mcore.files.regular import read_regular

MAX_JSON = 512 << 20
"""Bytes of a JSON file; the largest tokenizers and indexes have a tenth of that."""
_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def read_object(path: Path, kind: type[LlavaMcoreError] = FileError) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Args:
        kind: the error to raise.

    Raises:
        LlavaMcoreError: no such file, no regular file, too large, too deeply nested, not JSON, or no object.
    """
    return parse_object(read_regular(path, MAX_JSON, kind), str(path), kind)


def parse_object(text: str | bytes, where: str, kind: type[LlavaMcoreError] = FileError) -> dict[str, Any]:
    """Return the JSON object that a text is. Raises `kind`, which begins with `where`, for anything else."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise kind(f"{where}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise kind(f"{where}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise kind(f"{where}: expected a JSON object, found {_KINDS.get(type(content), 'a number')}")
    return content
