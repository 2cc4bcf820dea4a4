"""Files of torch.save, read without running anything that they hold."""

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

    torch.distributed.checkpoint (2.11) reads a checkpoint's entries that are not tensors with `weights_only=False`. The
    variable is torch's own, made to overrule that.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _LIFTED)}
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})
