"""Kernels that turn matrices into FP8 (e4m3) for grouped products, in the order in which these read them.

A grouped product reads both operands along the dimension that it sums over, and has one scale for each of their rows.
So the matrices are stored a second time, transposed, for the gradient of the inputs, which is summed over their rows.

g: groups, such as experts, k: columns, n: rows of each matrix.
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
def _matrices(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * height * width
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    inside = columns < width
    largest = tl.full((COLUMNS,), SMALLEST, tl.float32)
    # The largest value of each column gives its scale.
    first = 0
    while first < height:  # not range, whose end Triton's interpreter takes from no tensor
        places = place + (first + rows)[:, None] * width + columns[None, :]
        tile = tl.load(x + places, mask=(first + rows < height)[:, None] & inside[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(tile.to(tl.float32)), 0))
        first += ROWS
    tl.store(scales + tl.program_id(0) * width + columns, largest / LARGEST, mask=inside)
    # The same tiles again, scaled and written as rows.
    inverse = LARGEST / largest
    first = 0
    while first < height:
        mask = (first + rows < height)[:, None] & inside[None, :]
        tile = tl.load(x + place + (first + rows)[:, None] * width + columns[None, :], mask=mask, other=0.0)
        tile = (tile.to(tl.float32) * inverse[None, :]).to(values.dtype.element_ty)
        tl.store(values + place + columns[None, :] * height + (first + rows)[:, None], tile, mask=mask)
        first += ROWS
