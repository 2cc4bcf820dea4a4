"""Tensors as bytes in files: mapped when read, written where they belong, hashed without a copy."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_MAX_WRITE = 1 << 30  # one call writes at most 2 GiB


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
    if before % dtype.itemsize:
        raw = torch.frombuffer(window, dtype=torch.uint8, offset=before, count=count * dtype.itemsize)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(window, dtype=dtype, offset=before, count=count).view(shape)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in order; a copy is made only of one that is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def sha256(tensor: Tensor) -> str:
    """Return the hex digest of a tensor's bytes (dtype and shape are not part of it)."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same numbers in a storage that holds nothing else: torch.save writes whole storages."""
    if tensor.numel() == 0:
        return tensor.clone()
    shape, dtype = tensor.shape, tensor.dtype
    return torch.frombuffer(raw_bytes(tensor), dtype=torch.uint8).view(dtype).view(shape)


def write_at(file: int, tensor: Tensor, position: int) -> None:
    """Write a tensor's bytes at `position` of an open file.

    Raises:
        OSError: the disk is full, or the like.
    """
    data = raw_bytes(tensor)
    while data:
        written = os.pwrite(file, data[:_MAX_WRITE], position)
        data, position = data[written:], position + written


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

    def map(self) -> Tensor:
        """Return the tensor, mapped."""
        return map_tensor(self.path, self.offset, self.dtype, self.shape)


def write_tensor(target: TensorAt, tensor: Tensor) -> None:
    """Write a tensor to its place in an existing file.

    Raises:
        OSError: the disk is full, or the like.
    """
    with target.path.open("r+b") as file:
        write_at(file.fileno(), tensor, target.offset)
