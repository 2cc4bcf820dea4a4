"""Tensors as bytes in files: mapped when read, written where they belong, copied by the kernel, hashed in passing."""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Linux takes one page of memory for as much of a file as one call writes. Large ones are slow to find, and when part of
# the data must itself come from a file first, the rest of such a page is zeroed for every 64 KiB that arrive.
_PIECE = 64 << 10
_WINDOW = 32 << 20  # how much of a file is mapped at a time, to be hashed
_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
HASHERS = 2
"""Threads of one process that hash: SHA-256 takes about twice as long as a copy."""


def map_tensor(path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that lies in a file, contiguous, without reading it.

    Only the pages that are used come into memory, and they leave it with the tensor. Writing to the tensor does not
    change the file. `offset` in bytes; where it does not suit the dtype, the bytes are copied.

    Raises:
        OSError, ValueError: no such file, or it ends earlier.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    before = offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        window = mmap.mmap(
            file.fileno(), before + count * dtype.itemsize, access=mmap.ACCESS_COPY, offset=offset - before
        )
    window.madvise(mmap.MADV_SEQUENTIAL)  # what is not in memory yet is read ahead, several times faster
    if before % dtype.itemsize:
        raw = torch.frombuffer(window, dtype=torch.uint8, offset=before, count=count * dtype.itemsize)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(window, dtype=dtype, offset=before, count=count).view(shape)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in order; a copy is made only of one that is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_at(file: int, data: Tensor | memoryview, position: int) -> None:
    """Write a tensor's bytes at `position` of an open file.

    Raises:
        OSError: the disk is full, or the like.
    """
    rest = raw_bytes(data) if isinstance(data, Tensor) else data
    while rest:
        written = os.pwrite(file, rest[:_PIECE], position)
        rest, position = rest[written:], position + written


def copy_bytes(source: int, offset: int, target: int, position: int, count: int) -> None:
    """Copy from one open file into another; inside the kernel where it can, on some file systems without any data.

    Raises:
        OSError: the disk is full, the source ends earlier, or the like.
    """
    end = offset + count
    while offset < end:
        try:
            copied = os.copy_file_range(source, target, end - offset, offset, position)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            piece = os.pread(source, min(_PIECE, end - offset), offset)
            write_at(target, memoryview(piece), position)
            copied = len(piece)
        if copied == 0:
            raise OSError(errno.EIO, "the source ends before its tensors do")
        offset, position = offset + copied, position + copied


@dataclass(frozen=True)
class TensorAt:
    """A contiguous tensor in a file. `offset` in bytes."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def locate(self) -> TensorAt:
        """Return itself: what is in a checkpoint's file has to be looked for there first."""
        return self

    def map(self) -> Tensor:
        """Return the tensor, mapped."""
        return map_tensor(self.path, self.offset, self.dtype, self.shape)

    def windows(self) -> Iterator[Tensor]:
        """Yield the tensor's bytes in order, mapped, little of them at a time."""
        for start in range(0, self.num_bytes, _WINDOW):
            count = min(_WINDOW, self.num_bytes - start)
            yield map_tensor(self.path, self.offset + start, torch.uint8, (count,))


Data = Tensor | tuple[TensorAt, ...]
"""The numbers of a tensor: in memory, or in files, one run after the other."""


def sha256(data: Data) -> str:
    """Return the hex digest of a tensor's bytes (dtype and shape are not part of it)."""
    digest = hashlib.sha256()
    for part in [data] if isinstance(data, Tensor) else (x for run in data for x in run.windows()):
        digest.update(raw_bytes(part))
    return digest.hexdigest()


class Writer:
    """Writes tensors into open files, from memory or straight from other files."""

    def __init__(self) -> None:
        self._sources: dict[Path, int] = {}

    def write(self, target: int, position: int, data: Data) -> None:
        """Write the bytes of a tensor, or of runs one after the other, from `position` on.

        Raises:
            OSError: the disk is full, or the like.
        """
        if isinstance(data, Tensor):
            write_at(target, data, position)
            return
        for run in data:
            if run.path not in self._sources:
                self._sources[run.path] = os.open(run.path, os.O_RDONLY)
            copy_bytes(self._sources[run.path], run.offset, target, position, run.num_bytes)
            position += run.num_bytes

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._sources.values():
            os.close(handle)


def write_tensor(target: TensorAt, tensor: Tensor) -> None:
    """Write a tensor to its place in an existing file.

    Raises:
        OSError: the disk is full, or the like.
    """
    with target.path.open("r+b") as file:
        write_at(file.fileno(), tensor, target.offset)
