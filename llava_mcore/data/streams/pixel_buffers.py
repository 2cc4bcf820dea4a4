"""Pixels on their way from a loader process: in memory that both processes have, instead of through a pipe."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parked:
    """Where pixels lie."""

    slot: int
    shape: tuple[int, ...]
    """[k, h, w, 3]: as they lie in memory."""
    dtype: torch.dtype


class PixelSlots:
    """Slots that are used in turn. Made before the loader process is forked, which then puts pixels in.

    Anonymous memory: there is nothing to clean up, and no limit of /dev/shm to run into.
    """

    def __init__(self, num_bytes: int, num_ahead: int) -> None:
        """Reserve the slots; memory is only taken up by what is put in.

        Args:
            num_bytes: of a slot.
            num_ahead: batches that the loader process is asked for in advance. While one is taken out, so many may be
                put in; there is one slot more for safety.
        """
        self.num_ahead = num_ahead
        num_slots = num_ahead + 2
        memory = mmap.mmap(-1, num_slots * max(1, num_bytes))
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, -1)
        self._next = 0

    def put(self, pixels: Tensor) -> Parked | None:
        """Put pixels [k, 3, h, w] into the next slot; None if there are none or they are too many for one."""
        lying = pixels.permute(0, 2, 3, 1)
        if not pixels.numel() or pixels.nbytes > self._slots.shape[1]:
            return None
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        self._place(Parked(slot, tuple(lying.shape), pixels.dtype)).copy_(lying)
        return Parked(slot, tuple(lying.shape), pixels.dtype)

    def take(self, parked: Parked, *, pinned: bool) -> Tensor:
        """Return a copy of what was put in, [k, 3, h, w], in pinned memory if asked to."""
        place = self._place(parked)
        return torch.empty_like(place, pin_memory=pinned).copy_(place).permute(0, 3, 1, 2)

    def _place(self, parked: Parked) -> Tensor:
        size = parked.dtype.itemsize * torch.Size(parked.shape).numel()
        return self._slots[parked.slot, :size].view(parked.dtype).view(parked.shape)
