"""One kernel that splits queries, keys and values, and rotates the first two.

Transformer Engine (2.20) has kernels that rotate a single tensor, whose gradients another kernel must then join, and
one that also splits but is slower than these together unless a group has several query heads (`benchmarks/kernels.py`).

t: tokens, g: groups of heads, q: query heads of a group, d: head size, r: rotated dims of a head, p: size of a head in
the results, d or more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_VALUES = 8
"""Values of each half that a thread loads at a time, 16 bytes."""


class SplitRotated(torch.autograd.Function):
    """Queries [t, g * q, p], keys and values [t, g, p] of [t, g, (q + 2) * d]."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, angles: Tensor, size: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate in float32.

        Args:
            mixed: a group's query heads, its key and its value.
            angles: float32 [t, r], whose halves are equal.
            size: d.
            padded: p; heads end with zeros.
        """
        mixed, angles = mixed.contiguous(), angles.contiguous()
        tokens, groups, width = mixed.shape
        query = mixed.new_empty(tokens, groups * (width // size - 2), padded)
        key, value = (mixed.new_empty(tokens, groups, padded) for _ in range(2))
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
        return mixed, None, None, None


def _run(mixed: Tensor, query: Tensor, key: Tensor, value: Tensor, angles: Tensor, *, joins: bool) -> None:
    tokens, groups, padded = key.shape
    queries, half = query.shape[1] // groups, angles.shape[1] // 2
    size = mixed.shape[2] // (queries + 2)
    rest = size - 2 * half
    half_tile = triton.next_power_of_2(half)
    _split_rotated[(tokens,)](
        mixed,
        query,
        key,
        value,
        angles,
        GROUPS=groups,
        QUERIES=queries,
        SIZE=size,
        PADDED=padded,
        PADDING_TILE=triton.next_power_of_2(max(padded - size, 1)),
        HALF=half,
        HALF_TILE=half_tile,
        REST=rest,
        REST_TILE=triton.next_power_of_2(max(rest, 1)),
        ROWS=max(1, 32 * _VALUES // half_tile),
        JOINS=joins,
        num_warps=1,  # more of them compute the same sines
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
def _put(to_query: tl.tensor, to_key: tl.tensor, to_value: tl.tensor, values: tl.tensor, masks: tl.tuple) -> None:
    """Store each row where its head is."""
    of_query, of_key, of_value = masks
    tl.store(to_query, values, mask=of_query)
    tl.store(to_key, values, mask=of_key)
    tl.store(to_value, values, mask=of_value)


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
        _put(to_query, to_key, to_value, tl.load(mixed, mask=of_any, other=0.0), masks)


@triton.jit
def _clear(
    to_query: tl.tensor,
    to_key: tl.tensor,
    to_value: tl.tensor,
    rows: tl.tuple,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDING_TILE: tl.constexpr,
) -> None:
    """Put zeros after heads. rows: which are queries, keys and values."""
    are_queries, are_keys, are_values = rows
    after = SIZE + tl.arange(0, PADDING_TILE)[None, :]
    in_padding = after < PADDED
    masks = are_queries & in_padding, are_keys & in_padding, are_values & in_padding
    _put(to_query + after, to_key + after, to_value + after, 0.0, masks)


@triton.jit
def _split_rotated(
    mixed: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    angles: tl.tensor,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDING_TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST: tl.constexpr,
    REST_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    JOINS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_TILE)
    in_half = (half < HALF)[None, :]
    # All heads of a token have the same angles: sines take longer than the rest, so they are computed once.
    angle = tl.load(angles + token * 2 * HALF + half, mask=half < HALF, other=0.0)
    cos_of_token, sin_of_token = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    for start in tl.range(0, GROUPS * (QUERIES + 2), ROWS, loop_unroll_factor=4):
        rows = (start + tl.arange(0, ROWS))[:, None]
        # Which head a row is, and where it goes.
        group, place = rows // (QUERIES + 2), rows % (QUERIES + 2)
        exists = rows < GROUPS * (QUERIES + 2)
        is_query, is_key, is_value = exists & (place < QUERIES), exists & (place == QUERIES), exists & (place > QUERIES)
        rows_at = mixed + (token * GROUPS * (QUERIES + 2) + rows) * SIZE
        to_query = query + ((token * GROUPS + group) * QUERIES + place) * PADDED
        to_key = key + (token * GROUPS + group) * PADDED
        to_value = value + (token * GROUPS + group) * PADDED

        # Values are rotated by an angle of 0, so that all rows take the same code path.
        cos, sin = tl.where(is_value, 1.0, cos_of_token), tl.where(is_value, 0.0, sin_of_token)
        heads = is_query & in_half, is_key & in_half, is_value & in_half
        # Rotated halves: joined for the gradient, where the rotation is the inverse, else split.
        first, second = half[None, :], HALF + half[None, :]
        if JOINS:
            a = _joined(to_query + first, to_key + first, to_value + first, heads)
            b = _joined(to_query + second, to_key + second, to_value + second, heads)
            tl.store(rows_at + first, a * cos + b * sin, mask=exists & in_half)
            tl.store(rows_at + second, b * cos - a * sin, mask=exists & in_half)
        else:
            a = tl.load(rows_at + first, mask=exists & in_half, other=0.0).to(tl.float32)
            b = tl.load(rows_at + second, mask=exists & in_half, other=0.0).to(tl.float32)
            turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
            _put(to_query + first, to_key + first, to_value + first, turned_a, heads)
            _put(to_query + second, to_key + second, to_value + second, turned_b, heads)
        # Dims that are not rotated.
        if REST > 0:
            last = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
            in_rest = (tl.arange(0, REST_TILE) < REST)[None, :]
            masks = is_query & in_rest, is_key & in_rest, is_value & in_rest
            _move(rows_at + last, to_query + last, to_key + last, to_value + last, masks, JOINS)
        if PADDED > SIZE and not JOINS:
            _clear(to_query, to_key, to_value, (is_query, is_key, is_value), SIZE, PADDED, PADDING_TILE)
