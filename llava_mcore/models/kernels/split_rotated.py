"""One kernel that splits queries, keys and values, and rotates the first two.

Transformer Engine (2.20) has kernels that rotate a single tensor, whose gradients another kernel must then join, and
one that also splits but is slower than these together unless a group has several query heads (`benchmarks/kernels.py`).

t: tokens, g: groups of heads, q: query heads of a group, d: head size, r: rotated dims of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS, _WARPS = 8, 2
"""Heads of one token in a block, and the warps that work on it."""


class SplitRotated(torch.autograd.Function):
    """Queries [t, g * q, d], keys and values [t, g, d] of [t, g, (q + 2) * d]."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, angles: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate in float32.

        Args:
            mixed: a group's query heads, its key and its value.
            angles: float32 [t, r], whose halves are equal.
            size: d.
        """
        mixed, angles = mixed.contiguous(), angles.contiguous()
        tokens, groups, width = mixed.shape
        query = mixed.new_empty(tokens, groups * (width // size - 2), size)
        key, value = (mixed.new_empty(tokens, groups, size) for _ in range(2))
        _run(mixed, query, key, value, angles, joins=False)
        ctx.save_for_backward(angles)
        ctx.shape = mixed.shape
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate back, and join."""
        query, key, value = (x.contiguous() for x in gradients)
        (angles,) = ctx.saved_tensors
        mixed = query.new_empty(ctx.shape)
        _run(mixed, query, key, value, angles, joins=True)
        return mixed, None, None


def _run(mixed: Tensor, query: Tensor, key: Tensor, value: Tensor, angles: Tensor, *, joins: bool) -> None:
    tokens, groups, size = key.shape
    queries, half = query.shape[1] // groups, angles.shape[1] // 2
    rest = size - 2 * half
    heads = groups * (queries + 2)
    _split_rotated[(tokens, triton.cdiv(heads, _ROWS))](
        mixed,
        query,
        key,
        value,
        angles,
        groups,
        queries,
        SIZE=size,
        HALF=half,
        HALF_TILE=triton.next_power_of_2(half),
        REST=rest,
        REST_TILE=triton.next_power_of_2(max(rest, 1)),
        ROWS=_ROWS,
        JOINS=joins,
        num_warps=_WARPS,
    )


@triton.jit
def _joined(to_query: tl.tensor, to_key: tl.tensor, to_value: tl.tensor, masks: tl.tuple) -> tl.tensor:
    """Load each row from where its head is: the masks of the three exclude each other."""
    of_query, of_key, of_value = masks
    values = tl.load(to_query, mask=of_query, other=0.0).to(tl.float32)
    values += tl.load(to_key, mask=of_key, other=0.0).to(tl.float32)
    values += tl.load(to_value, mask=of_value, other=0.0).to(tl.float32)
    return values


@triton.jit
def _move(
    mixed: tl.tensor, to_query: tl.tensor, to_key: tl.tensor, to_value: tl.tensor, masks: tl.tuple, JOINS: tl.constexpr
) -> None:
    """Split or join the dims of heads that are not rotated."""
    of_query, of_key, of_value = masks
    of_any = of_query | of_key | of_value
    if JOINS:
        tl.store(mixed, _joined(to_query, to_key, to_value, masks), mask=of_any)
    else:
        values = tl.load(mixed, mask=of_any, other=0.0)
        tl.store(to_query, values, mask=of_query)
        tl.store(to_key, values, mask=of_key)
        tl.store(to_value, values, mask=of_value)


@triton.jit
def _split_rotated(
    mixed: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    angles: tl.tensor,
    groups: tl.tensor,
    queries: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST: tl.constexpr,
    REST_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    JOINS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Which head a row is, and where it goes.
    group, place = rows // (queries + 2), rows % (queries + 2)
    exists = rows < groups * (queries + 2)
    is_query, is_key, is_value = exists & (place < queries), exists & (place == queries), exists & (place > queries)
    rows_at = mixed + (token * groups * (queries + 2) + rows)[:, None] * SIZE
    to_query = query + ((token * groups + group) * queries + place)[:, None] * SIZE
    to_key = key + (token * groups + group)[:, None] * SIZE
    to_value = value + (token * groups + group)[:, None] * SIZE

    half = tl.arange(0, HALF_TILE)
    in_half = (half < HALF)[None, :]
    # Values are rotated by an angle of 0, so that all rows take the same code path.
    angle = tl.load(angles + token * 2 * HALF + half, mask=half < HALF, other=0.0)
    cos = tl.where(is_value[:, None], 1.0, tl.cos(angle)[None, :])
    sin = tl.where(is_value[:, None], 0.0, tl.sin(angle)[None, :])
    of_query, of_key, of_value = is_query[:, None] & in_half, is_key[:, None] & in_half, is_value[:, None] & in_half
    # Rotated halves: joined for the gradient, where the rotation is the inverse, else split.
    first, second = half[None, :], HALF + half[None, :]
    if JOINS:
        heads = of_query, of_key, of_value
        a = _joined(to_query + first, to_key + first, to_value + first, heads)
        b = _joined(to_query + second, to_key + second, to_value + second, heads)
        tl.store(rows_at + first, a * cos + b * sin, mask=exists[:, None] & in_half)
        tl.store(rows_at + second, b * cos - a * sin, mask=exists[:, None] & in_half)
    else:
        a = tl.load(rows_at + first, mask=exists[:, None] & in_half, other=0.0).to(tl.float32)
        b = tl.load(rows_at + second, mask=exists[:, None] & in_half, other=0.0).to(tl.float32)
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
        tl.store(to_query + first, turned_a, mask=of_query)
        tl.store(to_query + second, turned_b, mask=of_query)
        tl.store(to_key + first, turned_a, mask=of_key)
        tl.store(to_key + second, turned_b, mask=of_key)
        tl.store(to_value + first, turned_a, mask=of_value)
        tl.store(to_value + second, turned_b, mask=of_value)
    # Dims that are not rotated.
    if REST > 0:
        last = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
        in_rest = (tl.arange(0, REST_TILE) < REST)[None, :]
        masks = is_query[:, None] & in_rest, is_key[:, None] & in_rest, is_value[:, None] & in_rest
        _move(rows_at + last, to_query + last, to_key + last, to_value + last, masks, JOINS)
