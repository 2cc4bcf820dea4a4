"""Kernels that turn matrices into FP8 (e4m3) for grouped products, in the order in which these read them.

A grouped product reads both operands along the dimension that it sums over, and has one scale for each of their rows.
So operands that are summed over rows, such as an expert's tokens in a weight gradient, are stored transposed.

t: rows, such as tokens, sorted by group, g: groups, such as experts, k: columns, n: rows of each matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(448.0)
"""The largest e4m3 value."""
SMALLEST = tl.constexpr(2.0**-100)
"""The least largest value of a row, so that the inverse of its scale is finite."""
PADDING = 16
"""Rows of a group are filled up to a multiple of this: the product reads 16 bytes at a time, and wants some."""
_ROWS, _COLUMNS, _WARPS = 128, 64, 4


class Scaled(NamedTuple):
    """Values in FP8 and the float32 scales that they are multiplied by."""

    values: Tensor
    scales: Tensor


def quantize_rows(x: Tensor, out: Scaled | None = None) -> Scaled:
    """Return [..., k] with a scale for each row, [...]. out: what is overwritten and returned."""
    x = x.contiguous()
    width = x.shape[-1]
    result = out or Scaled(*_empty(x, x.shape, x.shape[:-1]))
    if x.numel():
        tile = triton.next_power_of_2(width)
        _rows[(x.numel() // width,)](x, *result, width, TILE=tile, num_warps=_WARPS)
    return result


def quantize_groups(x: Tensor, ends: Tensor) -> tuple[Scaled, Tensor]:
    """Return the transpose of [t, k], where each group begins at a multiple of `PADDING` and has zeros at its end, with
    a scale for each group and column, [g * k], and where groups end in it.

    Args:
        ends: int32 [g], where groups end in x. The host does not know them, so there is room for any.
    """
    x = x.contiguous()
    (num_rows, width), groups = x.shape, len(ends)
    room = -(-num_rows // PADDING) * PADDING + groups * PADDING
    result, padded_ends = Scaled(*_empty(x, (width, room), (groups * width,))), torch.empty_like(ends)
    grid = (groups, triton.cdiv(width, _COLUMNS))
    options = {"GROUPS": triton.next_power_of_2(groups), "PADDING": PADDING, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    _groups[grid](x, *result, ends, padded_ends, width, room, **options, num_warps=_WARPS)
    return result, padded_ends


def quantize_transposed(matrices: Tensor, out: Scaled | None = None) -> Scaled:
    """Return the transposes of matrices [g, n, k] with a scale for each column, [g, k]. out: as above."""
    groups, rows, width = matrices.shape
    result = out or Scaled(*_empty(matrices, (groups, width, rows), (groups, width)))
    grid = (groups, triton.cdiv(width, _COLUMNS))
    options = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _WARPS}
    _matrices[grid](matrices.contiguous(), *result, rows, width, **options)
    return result


def _empty(x: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    values, scales = shapes
    return x.new_empty(values, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


@triton.jit
def _rows(x: tl.tensor, values: tl.tensor, scales: tl.tensor, width: tl.tensor, TILE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < width
    tile = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(tile), 0), SMALLEST)
    tl.store(values + row * width + columns, (tile * (LARGEST / largest)).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, largest / LARGEST)


@triton.jit
def _groups(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    ends: tl.tensor,
    padded_ends: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    GROUPS: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    # Where this group is in x, and where in the result: after the padded groups before it.
    group, first_column = tl.program_id(0), tl.program_id(1) * COLUMNS
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    count = tl.load(ends + group) - start
    size = tl.maximum((count + PADDING - 1) // PADDING * PADDING, PADDING)
    indices = tl.arange(0, GROUPS)
    before = indices < group
    counts = tl.load(ends + indices, mask=before, other=0)
    counts -= tl.load(ends + indices - 1, mask=before & (indices > 0), other=0)
    sizes = tl.maximum((counts + PADDING - 1) // PADDING * PADDING, PADDING)
    target = tl.sum(tl.where(before, sizes, 0), 0)
    if first_column == 0:
        tl.store(padded_ends + group, target + size)
    source = x + start.to(tl.int64) * width
    _transpose(source, values + target, scales + group * width, count, size, width, room, ROWS, COLUMNS)


@triton.jit
def _matrices(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * rows * width
    target = scales + tl.program_id(0) * width
    _transpose(x + place, values + place, target, rows, rows, width, rows, ROWS, COLUMNS)


@triton.jit
def _transpose(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Quantize `count` rows of some columns, and write them as rows of `size` values, `stride` apart."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    inside = columns < width
    largest = tl.full((COLUMNS,), SMALLEST, tl.float32)
    # The largest value of each column gives its scale.
    first = 0
    while first < count:  # not range, whose end Triton's interpreter takes from no tensor
        places = (first + rows).to(tl.int64)[:, None] * width + columns[None, :]
        tile = tl.load(x + places, mask=(first + rows < count)[:, None] & inside[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(tile.to(tl.float32)), 0))
        first += ROWS
    tl.store(scales + columns, largest / LARGEST, mask=inside)
    # The same tiles again, scaled and written as rows.
    inverse = LARGEST / largest
    first = 0
    while first < size:
        places = (first + rows).to(tl.int64)[:, None] * width + columns[None, :]
        tile = tl.load(x + places, mask=(first + rows < count)[:, None] & inside[None, :], other=0.0)
        tile = (tile.to(tl.float32) * inverse[None, :]).to(values.dtype.element_ty)
        targets = columns.to(tl.int64)[None, :] * stride + (first + rows)[:, None]
        tl.store(values + targets, tile, mask=(first + rows < size)[:, None] & inside[None, :])
        first += ROWS
