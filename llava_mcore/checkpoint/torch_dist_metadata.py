"""A torch_dist checkpoint's `.metadata`, a pickle: read without executing anything that it names.

torch and megatron-core unpickle the file themselves whenever they load. `require_plain` reads it first, so they
only read files that are harmless.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from llava_mcore.compat.torch import accept_newer_metadata
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.json_files import read_object
from llava_mcore.files.regular import plain_name, read_regular, require_regular

FILE = ".metadata"
_MAX_BYTES = 1 << 30  # bytes; a model with a thousand layers on a thousand ranks has about ten million
_OF_TORCH = "torch.distributed.checkpoint"
# Only data classes, enumerations and constructors of sizes and layouts: none of them has side effects.
_ALLOWED = {
    f"{_OF_TORCH}.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_OF_TORCH}.filesystem": ("_StorageInfo",),
    f"{_OF_TORCH}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}  # fmt: skip


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of one iteration's folder.

    Raises:
        CheckpointError: it is missing or damaged, or names other classes or files outside of the folder.
    """
    path = folder / FILE
    data = read_regular(path, _MAX_BYTES)
    accept_newer_metadata()
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except _ForeignError as error:
        raise CheckpointError(
            f"{path}: holds the Python object {error}, which could execute code: it was not opened"
        ) from error
    except _DAMAGED as error:
        raise CheckpointError(f"{path}: damaged, or not metadata of torch_dist: {error!r}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path}: damaged, or not metadata of torch_dist")
    outside = sorted({name for name in _file_names(metadata) if not plain_name(name)})
    if outside:
        raise CheckpointError(problems(f"{path} names files outside of its folder", map(repr, outside[:10])))
    return metadata


def require_plain(folder: Path) -> None:
    """Refuse a folder that torch and megatron-core should not open. A second call costs nothing.

    Raises:
        CheckpointError: like `read_metadata`; or metadata.json is not valid, or a file is missing or too short.
    """
    try:
        status = (folder / FILE).stat()
    except OSError as error:
        raise CheckpointError(f"{folder}: not a readable torch_dist checkpoint: {error}") from error
    _require_plain(folder, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _require_plain(folder: Path, *_version: int) -> None:
    if "sharded_backend" not in read_object(folder / "metadata.json", CheckpointError):
        raise CheckpointError(f"{folder / 'metadata.json'}: not a description of a checkpoint")
    wrong = [text for name, size in _needed(read_metadata(folder)).items() if (text := _problem(folder / name, size))]
    if wrong:
        raise CheckpointError(problems(f"{folder} is damaged", wrong))


def _needed(metadata: Metadata) -> dict[str, int]:
    """Return the minimum size of each file in bytes."""
    sizes: dict[str, int] = {}
    for info in metadata.storage_data.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes


def _problem(path: Path, size: int) -> str | None:
    try:
        has = require_regular(path).st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return f"{path.name} has {has} bytes, {size} are used" if has < size else None


_DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError,
    MemoryError, OverflowError, RecursionError,
)  # fmt: skip
"""Errors that unpickling invalid bytes may raise."""


class _ForeignError(Exception):
    """A pickle names something that is not in the table."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return vars(importlib.import_module(module))[name]
        if module == "torch" and (name == "Size" or isinstance(vars(torch).get(name), torch.dtype)):
            return vars(torch)[name]
        raise _ForeignError(f"{module}.{name}")


def _file_names(metadata: Metadata) -> Iterator[Any]:
    for info in metadata.storage_data.values():
        yield vars(info).get("relative_path")
