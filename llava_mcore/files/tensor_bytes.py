"""Tensors as bytes in files: mapped when read, and hashed."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_WINDOW = 32 << 20  # how much of a file is mapped at a time, to be hashed or written
_ROWS = 1 << 20  # bytes of a tensor with gaps that are assembled at a time: they stay in the core's cache
HASHERS = 2
"""Threads of one process that hash: SHA-256 takes about twice as long as a copy."""


def map_tensor(path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor in a file, without reading it.

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
"""The numbers of a tensor: in memory, or in files, one byte range after the other."""


def as_bytes(data: Data) -> Iterator[Tensor]:
    """Yield the bytes of a tensor, or of byte ranges one after the other, in order: flat, of files little at a time."""
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
    """Tell whether a tensor of this dtype holds neither NaN nor infinite values."""
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
