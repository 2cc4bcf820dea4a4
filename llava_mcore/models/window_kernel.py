"""Full attention within windows of a few patches, one kernel for each pass; imported on GPUs only.

A window's queries, keys and values fit into one block, so nothing is kept between the passes but what they read, and
the backward pass needs no second kernel and no sums across blocks. torch's kernel for sequences of any length takes 1.8
times as long on windows of 64 in the forward pass, and 2.5 times in the backward pass (`benchmarks/kernels.py`).

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
        found = [torch.empty_like(x) for x in (query, key, value)]
        _, heads, size = query.shape
        given = (query, key, value, gradients[0].contiguous(), *found, bounds, size**-0.5, heads)
        _backward[(len(bounds) - 1, heads)](*given, **_tiles(size))
        return (*found, None)


def _tiles(size: int) -> dict[str, int]:
    tile = max(triton.next_power_of_2(size), 16)
    return {"SIZE": size, "SIZE_TILE": tile, "LONGEST": LONGEST, "num_warps": _WARPS}


@triton.jit
def _scores(q, k, scale, exists):  # type: ignore[no-untyped-def]
    """Return each query's probabilities, float32, before they are divided by their sums, and these."""
    scores = tl.where(exists[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    found = tl.exp(scores - tl.max(scores, 1)[:, None])
    return found, tl.sum(found, 1)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    out,
    bounds,
    scale,
    heads,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    LONGEST: tl.constexpr,
):
    start = tl.load(bounds + tl.program_id(0))
    number = tl.load(bounds + tl.program_id(0) + 1) - start
    if number == 0:
        return
    tokens, dims = tl.arange(0, LONGEST), tl.arange(0, SIZE_TILE)
    exists = tokens < number
    inside = exists[:, None] & (dims < SIZE)[None, :]
    places = ((start + tokens).to(tl.int64) * heads + tl.program_id(1))[:, None] * SIZE + dims[None, :]
    q = tl.load(query + places, mask=inside, other=0.0)
    k = tl.load(key + places, mask=inside, other=0.0)
    v = tl.load(value + places, mask=inside, other=0.0)
    found, total = _scores(q, k, scale, exists)
    tl.store(out + places, tl.dot(found.to(v.dtype), v) / total[:, None], mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    out_gradient,
    query_gradient,
    key_gradient,
    value_gradient,
    bounds,
    scale,
    heads,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    LONGEST: tl.constexpr,
):
    start = tl.load(bounds + tl.program_id(0))
    number = tl.load(bounds + tl.program_id(0) + 1) - start
    if number == 0:
        return
    tokens, dims = tl.arange(0, LONGEST), tl.arange(0, SIZE_TILE)
    exists = tokens < number
    inside = exists[:, None] & (dims < SIZE)[None, :]
    places = ((start + tokens).to(tl.int64) * heads + tl.program_id(1))[:, None] * SIZE + dims[None, :]
    q = tl.load(query + places, mask=inside, other=0.0)
    k = tl.load(key + places, mask=inside, other=0.0)
    v = tl.load(value + places, mask=inside, other=0.0)
    g = tl.load(out_gradient + places, mask=inside, other=0.0)
    found, total = _scores(q, k, scale, exists)
    p = found / total[:, None]
    tl.store(value_gradient + places, tl.dot(tl.trans(p.to(g.dtype)), g), mask=inside)
    of_p = tl.dot(g, tl.trans(v))
    of_scores = (p * (of_p - tl.sum(p * of_p, 1)[:, None]) * scale).to(q.dtype)
    tl.store(query_gradient + places, tl.dot(of_scores, k), mask=inside)
    tl.store(key_gradient + places, tl.dot(tl.trans(of_scores), q), mask=inside)
