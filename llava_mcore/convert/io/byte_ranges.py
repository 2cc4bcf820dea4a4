"""Runs: a box of a tensor as pieces of files that only have to be put one after the other.

What is a sequence of runs needs no memory: the kernel copies it from file to file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.mapping.slices import Box


def runs_of[Source](
    wanted: Box, parts: Sequence[tuple[Box, Source]], locate: Callable[[Source], TensorAt]
) -> tuple[TensorAt, ...] | None:
    """Return the numbers of a box, in order, as runs; None where they lie otherwise, or some are missing.

    Args:
        parts: boxes in the same coordinates as `wanted`, and where their data come from. They must not overlap.
        locate: returns where a part's tensor, of its box's size, lies; called only for parts that are needed.
    """
    found: list[tuple[int, Box, Box, Source]] = []
    for box, source in parts:
        common = wanted.overlap(box)
        if common is not None:
            place = run_in(common, wanted)
            if place is None or run_in(common, box) is None:
                return None
            found.append((place, common, box, source))
    if not found or sum(common.numel for _, common, _, _ in found) < wanted.numel:
        return None
    return tuple(_run(common, box, locate(source)) for _, common, box, source in sorted(found, key=lambda x: x[0]))


def run_in(inner: Box, outer: Box) -> int | None:
    """Return how many numbers of `outer` come before those of `inner`, a box inside it; None if these are no run."""
    whole = True  # so far, the dims behind are the same in both
    for size, full in zip(reversed(inner.size), reversed(outer.size), strict=True):
        if not whole and size > 1:
            return None
        whole = whole and size == full
    starts = inner.seen_from(outer.start).start
    return sum(start * math.prod(outer.size[dim + 1 :]) for dim, start in enumerate(starts))


def _run(common: Box, box: Box, at: TensorAt) -> TensorAt:
    before = run_in(common, box)
    assert before is not None
    return TensorAt(at.path, at.offset + before * at.dtype.itemsize, at.dtype, common.size)
