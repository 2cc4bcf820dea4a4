"""The Newton-Schulz iteration, which moves all singular values of a matrix close to one.

A step is X ← a X + (b A + c A²) X with A = X Xᵀ; where X has more rows than columns, X ← a X + X (b A + c A²) with
A = Xᵀ X. A and A² are symmetric: if they are large, the block above the diagonal is the transpose of the one below.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llava_mcore.compat.torch import times

_EPS = 1e-7
_SMALLEST = 2048
"""Rows of a block, which fill a GPU."""
type Coefficients = Sequence[tuple[float, float, float]]


def orthogonalized(matrix: Tensor, coefficients: Coefficients, *, scale: float, dtype: torch.dtype) -> Tensor:
    """Return a matrix, or each of a stack of them, after the iteration and times `scale`.

    Args:
        coefficients: a, b and c of each step.
        dtype: what products are computed in, and the result.
    """
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=matrix.ndim > 2).clamp_min(_EPS)
    x = (matrix / norm if matrix.ndim > 2 else times(matrix, norm.reciprocal())).to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    for step, (a, b, c) in enumerate(coefficients, start=1):
        by = scale if step == len(coefficients) else 1.0
        square = _symmetric(x.mT, x) if is_tall else _symmetric(x, x.mT)
        polynomial = _symmetric(square, square, square, beta=b * by, alpha=c * by)
        left, right = (x, polynomial) if is_tall else (polynomial, x)
        x = _product(torch.empty_like(x), left, right, x, beta=a * by)
    return x


def _symmetric(left: Tensor, right: Tensor, added: Tensor | None = None, **factors: float) -> Tensor:
    """Return beta * added + alpha * left · right, which is symmetric."""
    return _fill(left.new_empty(*left.shape[:-1], left.shape[-2]), left, right, added, **factors)


def _fill(out: Tensor, left: Tensor, right: Tensor, added: Tensor | None, **factors: float) -> Tensor:
    half = left.shape[-2] // 2
    if half < _SMALLEST:
        return _product(out, left, right, added, **factors)
    first, second = slice(None, half), slice(half, None)
    for rows in (first, second):
        of_block = None if added is None else added[..., rows, rows]
        _fill(out[..., rows, rows], left[..., rows, :], right[..., rows], of_block, **factors)
    below = None if added is None else added[..., second, first]
    _product(out[..., second, first], left[..., second, :], right[..., first], below, **factors)
    out[..., first, second].copy_(out[..., second, first].mT)
    return out


def _product(
    out: Tensor, left: Tensor, right: Tensor, added: Tensor | None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Write beta * added + alpha * left · right to `out`."""
    if added is None:
        return torch.matmul(left, right, out=out)
    add = torch.addmm if left.ndim == 2 else torch.baddbmm
    return add(added, left, right, beta=beta, alpha=alpha, out=out)
