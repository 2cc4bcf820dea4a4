"""Reads files of torch.save without executing anything in them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llava_mcore.errors import CheckpointError
from llava_mcore.files.regular import require_regular

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_FORCED, _LIFTED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Load what torch.save wrote to the host, if it consists of tensors, numbers, strings and containers of them.

    Raises:
        CheckpointError: the file does not exist, is damaged or has other contents.
    """
    try:
        require_regular(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except LOAD_ERRORS as error:
        raise CheckpointError(f"{path}: {why_refused(error)}") from error


LOAD_ERRORS = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors that torch.load may raise for a damaged file or one that torch.save has not written."""


def why_refused(error: BaseException) -> str:
    """Return why torch.load did not read a file, in one line: its own message advises to disable the protection."""
    match = _GLOBAL.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if match is not None:
        return (
            f"holds the Python object {match[1]}, which could execute code, so it was not opened. Only tensors, "
            "numbers, "
            "strings and containers of them are read"
        )
    if isinstance(error, pickle.UnpicklingError):
        return "damaged, or holds more than tensors, numbers, strings and containers of them"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return f"damaged, or not written by torch.save ({str(error).partition(chr(10))[0]})"


def why_not_loaded(error: BaseException) -> str:
    """Return why transformers did not load something, without its advice to run the folder's own code."""
    text = str(error).strip() or repr(error)
    if "trust_remote_code" in text:
        return "it needs its own Python code (auto_map), which is never run"
    return text


@contextlib.contextmanager
def without_objects() -> Iterator[None]:
    """Make every torch.load refuse Python objects, even if a library asks for them.

    torch.distributed.checkpoint (2.11) reads a checkpoint's non-tensor entries with `weights_only=False`. This
    environment variable of torch overrides that.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _LIFTED)}
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})
