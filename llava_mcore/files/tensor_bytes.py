"""Tensors as bytes in files: memory-mapped, hashed, and written at given offsets.

`Writer` bypasses the page cache if the file system supports it: a conversion writes what nobody reads soon. Through the
cache every byte needs memory that has to be found first, which evicts other files. Blocks shared with neighboring
tensors, and small tensors, go through the cache.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_WINDOW = 32 << 20  # bytes of a file that are mapped at a time, to be hashed or written
_ROWS = 1 << 20  # bytes of a non-contiguous tensor that are copied at a time: they fit the core's cache
HASHERS = 2
"""Threads of one process that hash: SHA-256 takes about twice as long as a copy."""


def map_tensor(path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a memory-mapped contiguous tensor of a file.

    Pages are read when they are used and freed with the tensor. Writing to the tensor does not change the file.
    `offset` in bytes; if it is not aligned for the dtype, the bytes are copied.

    Raises:
        OSError, ValueError: the file does not exist or is too short.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    before = offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        window = mmap.mmap(
            file.fileno(), before + count * dtype.itemsize, access=mmap.ACCESS_COPY, offset=offset - before
        )
    window.madvise(mmap.MADV_SEQUENTIAL)  # read ahead what is not in memory yet, which is several times faster
    if before % dtype.itemsize:
        raw = torch.frombuffer(window, dtype=torch.uint8, offset=before, count=count * dtype.itemsize)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(window, dtype=dtype, offset=before, count=count).view(shape)


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
        """Return itself; tensors in a checkpoint's file have to be found first."""
        return self

    def map(self) -> Tensor:
        """Return the tensor, memory-mapped."""
        return map_tensor(self.path, self.offset, self.dtype, self.shape)

    def windows(self) -> Iterator[Tensor]:
        """Yield the tensor's bytes in order, as small memory-mapped pieces."""
        for start in range(0, self.num_bytes, _WINDOW):
            count = min(_WINDOW, self.num_bytes - start)
            yield map_tensor(self.path, self.offset + start, torch.uint8, (count,))


Data = Tensor | tuple[TensorAt, ...]
"""The values of a tensor: in memory, or as consecutive byte ranges in files."""


def as_bytes(data: Data) -> Iterator[Tensor]:
    """Yield the bytes of a tensor, or of byte ranges, in order: flat, and in small pieces if they are in files."""
    if not isinstance(data, Tensor):
        yield from (window for part in data for window in part.windows())
    elif data.is_contiguous():
        yield _flat_bytes(data)
    else:
        rows = max(1, _ROWS * len(data) // data.nbytes)
        yield from (_flat_bytes(x.contiguous()) for x in data.split(rows))


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_finite(data: Data, dtype: torch.dtype) -> bool:
    """Return whether a tensor of this dtype has neither NaN nor infinite values."""
    if not dtype.is_floating_point:
        return True
    for part in as_bytes(data):
        values = part.view(dtype)
        values = values.float() if dtype.itemsize == 1 else values
        if len(values) and not torch.stack(values.aminmax()).isfinite().all():
            return False
    return True


def sha256(data: Data) -> str:
    """Return the hex digest of a tensor's bytes (dtype and shape are not part of it)."""
    digest = hashlib.sha256()
    for part in as_bytes(data):
        digest.update(part.numpy().data)
    return digest.hexdigest()


_BLOCK = max(4096, mmap.PAGESIZE)  # direct writes start and end at multiples of this, in the file and in memory
_BUFFER = 2 << 20
_DIRECT_FROM = 256 << 10  # bytes; smaller writes do not pay off
# Linux allocates one (large) page of memory for as much of a file as one call writes. Large pages are slow to find, and
# if the data itself is mapped from a file, the rest of such a page is zeroed for every 64 KiB that arrive.
_PIECE = 64 << 10
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Writer:
    """Writes into existing files; not thread-safe."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._buffer = torch.frombuffer(mmap.mmap(-1, _BUFFER), dtype=torch.uint8)  # starts at a page

    @property
    def paths(self) -> frozenset[Path]:
        """The files written to, which have to be synced."""
        return frozenset(self._files)

    def write(self, path: Path, position: int, parts: Iterable[Tensor]) -> None:
        """Write flat byte tensors one after the other, starting at byte `position` of a file.

        Raises:
            OSError: for example, the disk is full.
        """
        if path not in self._files:
            self._files[path] = _File(path)
        file = self._files[path]
        begin = end = position % _BLOCK  # the buffer's contents, at the same offset within a block as in the file
        for part in parts:
            while len(part):
                count = min(len(part), _BUFFER - end)
                self._buffer[end : end + count].copy_(part[:count])  # by torch, so that other threads can run
                part, end = part[count:], end + count
                if end == _BUFFER:
                    file.write(self._buffer[begin:end], position)
                    position, begin, end = position + end - begin, 0, 0
        file.write(self._buffer[begin:end], position)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class _File:
    """A file that is written to directly and through the cache."""

    def __init__(self, path: Path) -> None:
        self._cached = os.open(path, os.O_WRONLY)
        try:
            self._direct: int | None = os.open(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                os.close(self._cached)
                raise
            self._direct = None

    def write(self, part: Tensor, position: int) -> None:
        """Write bytes whose offset in a block is the same in memory and in the file."""
        first = -position % _BLOCK
        last = len(part) - (position + len(part)) % _BLOCK
        done = 0
        if first + _DIRECT_FROM <= last:
            self._write_cached(part[:first], position)
            done = first + self._write_blocks(part[first:last], position + first)
        self._write_cached(part[done:], position + done)

    def _write_blocks(self, part: Tensor, position: int) -> int:
        """Return the number of bytes written; the rest has to go through the cache."""
        if self._direct is None:
            return 0
        try:
            return os.pwrite(self._direct, part.numpy().data, position)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._close_direct()  # it needs larger blocks
            return 0

    def _write_cached(self, part: Tensor, position: int) -> None:
        rest = part.numpy().data
        while rest:
            written = os.pwrite(self._cached, rest[:_PIECE], position)
            rest, position = rest[written:], position + written

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def close(self) -> None:
        self._close_direct()
        os.close(self._cached)
