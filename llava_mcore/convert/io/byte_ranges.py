"""A slice of a tensor as consecutive byte ranges of files.

Such a slice needs no memory: the kernel copies it from file to file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.weights.slices import TensorSlice


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
