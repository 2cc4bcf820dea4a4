"""Reads JSON files that other programs may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llava_mcore.errors import FileError, LlavaMcoreError
from llava_mcore.files.regular import read_regular

MAX_JSON = 512 << 20
"""Maximum size of a JSON file in bytes; the largest tokenizers and indexes have a tenth of that."""
_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def read_object(path: Path, kind: type[LlavaMcoreError] = FileError) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        kind: the error to raise.

    Raises:
        LlavaMcoreError: the file does not exist, is not a regular file, is too large or too deeply nested, or is not a
            JSON object.
    """
    return parse_object(read_regular(path, MAX_JSON, kind), str(path), kind)


def parse_object(text: str | bytes, where: str, kind: type[LlavaMcoreError] = FileError) -> dict[str, Any]:
    """Parse a JSON object. Raises `kind` with a message that starts with `where` for anything else."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise kind(f"{where}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise kind(f"{where}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise kind(f"{where}: expected a JSON object, found {_KINDS.get(type(content), 'a number')}")
    return content
