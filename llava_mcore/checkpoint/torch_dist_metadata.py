"""A torch_dist checkpoint's `.metadata`, a pickle: read without executing anything that it names; and what it lists.

torch and megatron-core unpickle the file themselves whenever they load. `require_plain` reads it first, so they
only read files that are harmless. `StoredTensors` says where the values of every tensor are, for an export that reads
them without torch's loader.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
from collections.abc import Buffer, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from llava_mcore.compat.torch import accept_newer_metadata, file_offset
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.regular import plain_name, read_object, read_regular, require_regular
from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.files.torch_files import LOAD_ERRORS, why_refused
from llava_mcore.weights.slices import Shape, TensorSlice

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


@dataclass(frozen=True)
class Chunk:
    """One tensor that torch.save wrote at an offset of a file, with its length in bytes."""

    path: Path
    offset: int
    length: int

    def locate(self) -> TensorAt:
        """Read the tensor's pickle and return where its values are.

        Raises:
            CheckpointError: it is damaged, or not written by megatron-core.
        """
        try:
            with self.path.open("rb") as file:
                window: Any = _Window(file, self.offset, self.length)
                tensor = torch.load(window, map_location="meta", weights_only=True)
        except LOAD_ERRORS as error:
            raise CheckpointError(f"{self.path}: at byte {self.offset}: {why_refused(error)}") from error
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{self.path}: at byte {self.offset}: a {type(tensor).__name__}, expected a tensor")
        if not tensor.is_contiguous():
            raise CheckpointError(f"{self.path}: the tensor at byte {self.offset} is not contiguous")
        return TensorAt(self.path, self.offset + file_offset(tensor), tensor.dtype, tuple(tensor.shape))


class _Window(io.RawIOBase):
    """A part of a file as a separate file object."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        return self.position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)[: max(self.length - self.position, 0)]
        self.file.seek(self.offset + self.position)
        count = self.file.readinto(view)
        self.position += count
        return count


@dataclass(frozen=True)
class StoredParameter:
    """A parameter is `tensor_slice` of a stored tensor; `chunks`, in the same coordinates, overlap with it."""

    tensor_slice: TensorSlice
    chunks: tuple[tuple[TensorSlice, Chunk | TensorAt], ...]
    dtype: torch.dtype


class StoredTensors:
    """Keys, shapes, dtypes and chunks of every tensor in one iteration's folder."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self._storage = folder, metadata.storage_data
        self._tensors = {
            key: x for key, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)
        }

    @classmethod
    def open(cls, folder: Path) -> StoredTensors:
        """Read the metadata.

        Raises:
            CheckpointError: like `read_metadata`.
        """
        return cls(folder, read_metadata(folder))

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> Shape:
        """Return the global shape of one tensor, including dims for layers."""
        return tuple(self._tensors[key].size)

    def num_rows(self, key: str) -> int:
        """Return the number of rows of a tensor that does not belong to a layer."""
        return self.shape(key)[0]

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        return self._tensors[key].properties.dtype

    def parameter(self, key: str, requested: TensorSlice) -> StoredParameter:
        """Return a slice of one tensor, with the chunks that overlap with it.

        Raises:
            CheckpointError: a chunk is stored in a way that only torch.distributed.checkpoint's extensions read.
        """
        low, high = (requested.start[0], requested.start[0] + requested.size[0]) if requested.size else (0, 1)
        chunks: list[tuple[TensorSlice, Chunk | TensorAt]] = []
        for x in self._tensors[key].chunks:
            if requested.size and not (x.offsets[0] < high and low < x.offsets[0] + x.sizes[0]):
                continue  # usually another layer: a stored tensor has a chunk for each
            info = self._storage[MetadataIndex(key, x.offsets)]
            if info.transform_descriptors:
                raise CheckpointError(f"{self.folder}: {key} is stored with {info.transform_descriptors}")
            path = self.folder / info.relative_path
            chunks.append((TensorSlice(tuple(x.offsets), tuple(x.sizes)), Chunk(path, info.offset, info.length)))
        return StoredParameter(requested, tuple(chunks), self.dtype(key))
