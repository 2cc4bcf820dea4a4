"""Axis-aligned slices of a tensor, and assembling one slice from others.

A checkpoint stores a tensor as chunks, each a slice of it; a Hugging Face tensor is often a slice (some rows) of a
Megatron tensor. Import and export both copy between the two sets of slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llava_mcore.files.tensor_bytes import TensorAt

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSlice:
    """`size[d]` elements starting at `start[d]`, in every dim of a tensor."""

    start: Shape
    size: Shape

    @classmethod
    def full(cls, shape: Shape) -> TensorSlice:
        """Return the slice that covers a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def seen_from(self, origin: Shape) -> TensorSlice:
        """Return the same slice in the coordinates of a tensor that starts at `origin`."""
        return TensorSlice(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.size)

    def overlap(self, other: TensorSlice) -> TensorSlice | None:
        """Return the intersection of both slices, or None."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = zip(self.start, self.size, other.start, other.size, strict=True)
        size = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, start, strict=True))
        return TensorSlice(start, size) if all(n > 0 for n in size) else None

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


def slices_of_range(shape: Shape, start: int, stop: int) -> list[TensorSlice]:
    """Return the elements `start` to `stop` (exclusive) of a flattened tensor as slices of the tensor, in order.

    A matrix gives at most three slices: the end of a row, whole rows, the beginning of a row.
    """
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows: first to last (exclusive)
    if start >= stop:
        return []
    if first > last:
        return _in_row(last, shape, start, stop)
    slices = _in_row(first - 1, shape, start, first * row) if start < first * row else []
    if first < last:
        slices.append(TensorSlice((first, *[0] * len(shape[1:])), (last - first, *shape[1:])))
    return slices + _in_row(last, shape, last * row, stop)


def _in_row(index: int, shape: Shape, start: int, stop: int) -> list[TensorSlice]:
    row = math.prod(shape[1:])
    inside = slices_of_range(shape[1:], start - index * row, stop - index * row)
    return [TensorSlice((index, *tensor_slice.start), (1, *tensor_slice.size)) for tensor_slice in inside]


class Scratch:
    """A reusable buffer: fresh pages for every tensor would cost more than copying into them."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: Shape, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, which overwrites the previous one."""
        num_bytes = math.prod(size) * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes].view(dtype).view(size)


def read_slice[Source](
    requested: TensorSlice,
    parts: Sequence[tuple[TensorSlice, Source]],
    read: Callable[[Source], Tensor],
    dtype: torch.dtype,
    scratch: Scratch,
) -> tuple[Tensor, int]:
    """Assemble one slice and return it with the number of its elements that the parts cover.

    Args:
        parts: slices in the same coordinates as `requested`, and the sources of their data. They must not overlap.
        read: returns a part's tensor; called only for the parts that are needed, in order.
        scratch: buffer for assembled slices.

    A slice inside one part is a view of it, without a copy. Elements that no part covers are zero.
    """
    # One part has all of it: a view.
    needed = [
        (tensor_slice, common, source)
        for tensor_slice, source in parts
        if (common := requested.overlap(tensor_slice)) is not None
    ]
    if len(needed) == 1 and needed[0][1] == requested:
        tensor_slice, common, source = needed[0]
        return common.seen_from(tensor_slice.start).cut(read(source)), requested.numel
    # Assembled from several parts, with zeros where there is none.
    held = sum(common.numel for _, common, _ in needed)
    result = scratch.empty(requested.size, dtype)
    if held < requested.numel:
        result.zero_()
    for tensor_slice, common, source in needed:
        common.seen_from(requested.start).cut(result).copy_(common.seen_from(tensor_slice.start).cut(read(source)))
    return result, held


def byte_ranges_of[Source](
    requested: TensorSlice, parts: Sequence[tuple[TensorSlice, Source]], locate: Callable[[Source], TensorAt]
) -> tuple[TensorAt, ...] | None:
    """Return the values of a slice, in order, as byte ranges; None if their order differs, or some are missing.

    Args:
        parts: slices in the same coordinates as `requested`, and the sources of their data. They must not overlap.
        locate: returns the location of a part's tensor; called only for the parts that are needed.
    """
    overlaps: list[tuple[int, TensorSlice, TensorSlice, Source]] = []
    for tensor_slice, source in parts:
        common = requested.overlap(tensor_slice)
        if common is not None:
            offset = offset_in(common, requested)
            if offset is None or offset_in(common, tensor_slice) is None:
                return None
            overlaps.append((offset, common, tensor_slice, source))
    if not overlaps or sum(common.numel for _, common, _, _ in overlaps) < requested.numel:
        return None
    return tuple(
        _byte_range(common, tensor_slice, locate(source))
        for _, common, tensor_slice, source in sorted(overlaps, key=lambda x: x[0])
    )


def offset_in(inner: TensorSlice, outer: TensorSlice) -> int | None:
    """Return the number of values of `outer` before those of `inner`, a slice inside it; None if they are not
    contiguous."""
    is_full = True  # so far, the later dims are equal in both
    for size, full in zip(reversed(inner.size), reversed(outer.size), strict=True):
        if not is_full and size > 1:
            return None
        is_full = is_full and size == full
    starts = inner.seen_from(outer.start).start
    return sum(start * math.prod(outer.size[dim + 1 :]) for dim, start in enumerate(starts))


def _byte_range(common: TensorSlice, tensor_slice: TensorSlice, at: TensorAt) -> TensorAt:
    before = offset_in(common, tensor_slice)
    assert before is not None
    return TensorAt(at.path, at.offset + before * at.dtype.itemsize, at.dtype, common.size)
