"""Full attention within windows of a few patches, one kernel for each pass.

A window's queries, keys and values fit into one block, so only the inputs are kept for the backward pass, which needs
no second kernel and no sums across blocks. torch's kernel for sequences of any length takes longer on such windows
(`benchmarks/kernels.py`).

t: packed tokens, n: heads, d: head size, w: windows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST = 64
"""Tokens of a window at most: those of a block."""
_WARPS = 4


class WindowAttention(torch.autograd.Function):
    """Attention output [t, n, d] of queries, keys and values [t, n, d] in half precision; softmax in float32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
        """
        Args:
            bounds: int32 [w + 1], where windows begin; none has more than `LONGEST` tokens, and some may be empty.
        """
        query, key, value = (x.contiguous() for x in (query, key, value))
        out = torch.empty_like(query)
        _, heads, size = query.shape
        _forward[(len(bounds) - 1, heads)](query, key, value, out, bounds, size**-0.5, heads, **_tiles(size))
        ctx.save_for_backward(query, key, value, bounds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        query, key, value, bounds = ctx.saved_tensors
        results = [torch.empty_like(x) for x in (query, key, value)]
        _, heads, size = query.shape
        arguments = (query, key, value, gradients[0].contiguous(), *results, bounds, size**-0.5, heads)
        _backward[(len(bounds) - 1, heads)](*arguments, **_tiles(size))
        return (*results, None)


def _tiles(size: int) -> dict[str, int]:
    tile = max(triton.next_power_of_2(size), 16)
    return {"SIZE": size, "SIZE_TILE": tile, "LONGEST": LONGEST, "num_warps": _WARPS}


@triton.jit
def _window(
    bounds: tl.tensor, heads: tl.tensor, SIZE: tl.constexpr, SIZE_TILE: tl.constexpr, LONGEST: tl.constexpr
) -> Any:
    """Return a window's number of tokens, the rows of a block that they fill, the block's offsets in memory, and which
    of these belong to the window."""
    start = tl.load(bounds + tl.program_id(0))
    count = tl.load(bounds + tl.program_id(0) + 1) - start
    tokens, dims = tl.arange(0, LONGEST), tl.arange(0, SIZE_TILE)
    exists = tokens < count
    places = ((start + tokens).to(tl.int64) * heads + tl.program_id(1))[:, None] * SIZE + dims[None, :]
    return count, exists, places, exists[:, None] & (dims < SIZE)[None, :]


@triton.jit
def _exponentials(q: tl.tensor, k: tl.tensor, scale: tl.tensor, exists: tl.tensor) -> Any:
    """Return the exponentials of each query's scores, float32, and their sums."""
    scores = tl.where(exists[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    exponentials = tl.exp(scores - tl.max(scores, 1)[:, None])
    return exponentials, tl.sum(exponentials, 1)


@triton.jit
def _forward(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    bounds: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    LONGEST: tl.constexpr,
) -> None:
    count, exists, places, inside = _window(bounds, heads, SIZE, SIZE_TILE, LONGEST)
    if count == 0:
        return
    q = tl.load(query + places, mask=inside, other=0.0)
    k = tl.load(key + places, mask=inside, other=0.0)
    v = tl.load(value + places, mask=inside, other=0.0)
    exponentials, total = _exponentials(q, k, scale, exists)
    tl.store(out + places, tl.dot(exponentials.to(v.dtype), v) / total[:, None], mask=inside)


@triton.jit
def _backward(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out_gradient: tl.tensor,
    query_gradient: tl.tensor,
    key_gradient: tl.tensor,
    value_gradient: tl.tensor,
    bounds: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    LONGEST: tl.constexpr,
) -> None:
    count, exists, places, inside = _window(bounds, heads, SIZE, SIZE_TILE, LONGEST)
    if count == 0:
        return
    q = tl.load(query + places, mask=inside, other=0.0)
    k = tl.load(key + places, mask=inside, other=0.0)
    v = tl.load(value + places, mask=inside, other=0.0)
    g = tl.load(out_gradient + places, mask=inside, other=0.0)
    exponentials, total = _exponentials(q, k, scale, exists)
    p = exponentials / total[:, None]
    tl.store(value_gradient + places, tl.dot(tl.trans(p.to(g.dtype)), g), mask=inside)
    # The gradient of softmax: p * (dp - sum(p * dp)), and the scale of the scores.
    of_p = tl.dot(g, tl.trans(v))
    of_scores = (p * (of_p - tl.sum(p * of_p, 1)[:, None]) * scale).to(q.dtype)
    tl.store(query_gradient + places, tl.dot(of_scores, k), mask=inside)
    tl.store(key_gradient + places, tl.dot(tl.trans(of_scores), q), mask=inside)
