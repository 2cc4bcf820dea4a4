"""Files that others may have made, read with limits and without running anything that they hold."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llava_mcore.errors import CheckpointError, LlavaMcoreError

MAX_JSON = 512 << 20
"""Bytes of a JSON file; the largest tokenizers and indexes have a tenth of that."""
_LONGEST_NAME = 255  # bytes, of Linux' file systems
_GLOBAL = re.compile(r"GLOBAL (\S+)")
_FORCED, _LIFTED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def plain_name(name: object) -> bool:
    """Tell whether this is the name of a file in a folder, not of one elsewhere."""
    is_text = isinstance(name, str) and name not in ("", ".", "..") and len(name.encode()) <= _LONGEST_NAME
    return is_text and not {"/", "\\", "\0"} & set(str(name))


def read_json(path: Path, kind: type[LlavaMcoreError] = CheckpointError) -> dict[str, Any]:
    """Return a JSON file's object.

    Args:
        kind: the error to raise.

    Raises:
        LlavaMcoreError: no such file, no regular file, too large, too deeply nested, not JSON, or no object.
    """
    data = read_regular(path, MAX_JSON, kind)
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise kind(f"{path}: nested too deeply") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise kind(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise kind(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_regular(path: Path, most: int, kind: type[LlavaMcoreError] = CheckpointError) -> bytes:
    """Return a file's bytes.

    Args:
        most: bytes that it may have.
        kind: the error to raise.

    Raises:
        LlavaMcoreError: no such file, no regular file (a pipe would never end), or too large.
    """
    try:
        size = require_regular(path, kind).st_size
        if size > most:
            raise kind(f"{path}: {size:,} bytes, at most {most:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}") from error


def require_regular(path: Path, kind: type[LlavaMcoreError] = CheckpointError) -> os.stat_result:
    """Return a file's status, links followed.

    Raises:
        OSError: no such file.
        LlavaMcoreError: a folder, a pipe or a device.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise kind(f"{path}: not a regular file")
    return status


def load_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Return what torch.save wrote, if it is made of tensors, numbers, texts and containers of them; on the host.

    Raises:
        CheckpointError: no such file, damaged, or it holds anything else.
    """
    try:
        require_regular(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except LOAD_ERRORS as error:
        raise CheckpointError(f"{path}: {why_refused(error)}") from error


LOAD_ERRORS = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""What torch.load may end in when a file is damaged or not meant for it."""


def why_refused(error: BaseException) -> str:
    """Say in a line why torch.load did not read a file: its own words advise to switch the protection off."""
    found = _GLOBAL.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if found is not None:
        return (
            f"holds the Python object {found[1]}, which could execute code: it is not opened. Only tensors, numbers, "
            "texts and containers of them are read"
        )
    if isinstance(error, pickle.UnpicklingError):
        return "damaged, or holds more than tensors, numbers, texts and containers of them"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return f"damaged, or not written by torch.save ({str(error).partition(chr(10))[0]})"


def why_not_loaded(error: BaseException) -> str:
    """Say why transformers did not load something; where it would run a folder's own code, without advising that."""
    text = str(error).strip() or repr(error)
    if "trust_remote_code" in text:
        return "it needs Python code of its own (auto_map), which is never run"
    return text


@contextlib.contextmanager
def without_objects() -> Iterator[None]:
    """Let every torch.load refuse Python objects, also where a library asks for them.

    torch.distributed.checkpoint (2.11) reads a checkpoint's entries that are no tensors with `weights_only=False`. The
    variable is torch's own, made to overrule that.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _LIFTED)}
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})
