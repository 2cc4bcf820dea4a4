"""Tensors as bytes in files: memory-mapped and hashed."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Iterator
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
