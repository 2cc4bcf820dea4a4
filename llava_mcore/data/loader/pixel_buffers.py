"""Passes pixels from a loader process in shared memory instead of through a pipe."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from llava_mcore.media.pixels import as_used, in_memory


@dataclass(frozen=True, slots=True)
class Buffered:
    """The buffer that contains pixels."""

    buffer: int
    shape: tuple[int, ...]
    """[tiles, h, w, 3], as they are in memory; [patches, f]."""
    dtype: torch.dtype


class PixelBuffers:
    """Buffers that are used in turn. They are created before the loader process is forked, which then fills them.

    They are anonymous memory: there is nothing to clean up, and /dev/shm's limit does not apply. A copy that the loader
    process sends is the object that it was forked with.
    """

    def __init__(self, num_bytes: int, num_ahead: int) -> None:
        """Reserve the buffers; memory is only used when they are filled.

        Args:
            num_bytes: size of a buffer.
            num_ahead: batches that the loader process prepares in advance. While one is read, so many may be
                written; there is one more buffer for safety.
        """
        self.num_ahead = num_ahead
        self._index = next(_INDICES)
        _OPEN[self._index] = self
        num_buffers = num_ahead + 2
        memory = mmap.mmap(-1, num_buffers * max(1, num_bytes))
        self._buffers = torch.frombuffer(memory, dtype=torch.uint8).view(num_buffers, -1)
        self._next = 0

    def __reduce__(self) -> tuple[Callable[[int], PixelBuffers], tuple[Any, ...]]:
        return _opened, (self._index,)

    def put(self, pixels: Tensor) -> Buffered | None:
        """Put tiles [tiles, 3, h, w] or patches [patches, f] into the next buffer.

        None if there are none, or they are too many for a buffer.
        """
        laid_out = in_memory(pixels)
        if not pixels.numel() or pixels.nbytes > self._buffers.shape[1]:
            return None
        buffer, self._next = self._next, (self._next + 1) % len(self._buffers)
        buffered = Buffered(buffer, tuple(laid_out.shape), pixels.dtype)
        self._view(buffered).copy_(laid_out)
        return buffered

    def take(self, buffered: Buffered, *, pinned: bool) -> Tensor:
        """Return a copy of what was put in, in pinned memory if asked to."""
        pixels = self._view(buffered)
        return as_used(torch.empty_like(pixels, pin_memory=pinned).copy_(pixels))

    def _view(self, buffered: Buffered) -> Tensor:
        size = buffered.dtype.itemsize * torch.Size(buffered.shape).numel()
        return self._buffers[buffered.buffer, :size].view(buffered.dtype).view(buffered.shape)


_INDICES = itertools.count()
_OPEN: WeakValueDictionary[int, PixelBuffers] = WeakValueDictionary()
"""All of this process: torch's thread that pins memory receives deliveries, and nothing else."""


def _opened(index: int) -> PixelBuffers:
    return _OPEN[index]
