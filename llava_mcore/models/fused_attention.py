"""Causal attention on GPUs with windows, soft-capped scores and packed sequences, by torch's fused kernels.

Nothing of the size of the scores is kept, and the host never waits: boundaries of packed sequences stay on the device,
and what follows from them is computed once for all layers of a micro-batch.

s: tokens, b: batch, t: packed tokens, n: heads, g: query groups, d: head size.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

LONGEST_HEAD = 256
"""Head size up to which both kernels exist."""
BLOCK = 128
_MASKS = 8
"""Masks that are kept: two of a micro-batch (with and without a window), for the micro-batches that a pipeline has in
flight."""
_FAR = 2**30
"""Tokens that a layer without a window sees."""


def fits(query: Tensor, softcap: float | None) -> bool:
    """Return whether these kernels take such queries."""
    head = query.shape[-1]
    in_half = query.dtype in (torch.bfloat16, torch.float16)
    fits_flex = softcap is None or head & (head - 1) == 0
    return query.device.type == "cuda" and in_half and head <= LONGEST_HEAD and fits_flex


def attend_rows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Return [s, b, n*d] for [s, b, n or g, d]."""
    s, b = q.shape[:2]
    if softcap is not None:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = _capped(q, k, v, _mask(None, s, window, q.device), scale, softcap)
        return out.permute(2, 0, 1, 3).flatten(2)
    bounds = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=q.device)
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    return _varlen(q, k, v, bounds, s, scale, window).unflatten(0, (b, s)).transpose(0, 1).flatten(2)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return [t, n*d] for [t, n or g, d]. bounds: int32 [sequences + 1], the last of which is t."""
    if softcap is None:
        return _varlen(q, k, v, bounds, longest, scale, window).flatten(1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return _capped(q, k, v, _mask(bounds, q.shape[2], window, q.device), scale, softcap)[0].transpose(0, 1).flatten(1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None) -> Tensor:
    seen = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=seen)
    assert isinstance(out, Tensor)
    return out


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, cap: float) -> Tensor:
    """Return [b, n, s, d] for scores x that become cap * tanh(x / cap)."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    attend: Callable[..., Any] = _compiled() if q.device.type == "cuda" else flex_attention
    out: Tensor = attend(q, k, v, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Without `fullgraph` a call that was not compiled would compute all scores.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


_recent: OrderedDict[tuple[int, int, int | None, torch.device], tuple[Tensor | None, BlockMask]] = OrderedDict()


def _mask(bounds: Tensor | None, length: int, window: int | None, device: torch.device) -> BlockMask:
    """Return the mask of a micro-batch, which its first layer has made."""
    key = (id(bounds), length, window, device)
    if key in _recent:
        _recent.move_to_end(key)
        return _recent[key][1]
    positions = torch.arange(length, dtype=torch.int32, device=device)
    sequences = torch.zeros_like(positions)
    if bounds is not None:
        sequences = torch.bucketize(positions, bounds, out_int32=True, right=True)
    mask = causal_mask(sequences, window)
    _recent[key] = (bounds, mask)  # with the bounds, so that no other tensor gets their id
    if len(_recent) > _MASKS:
        _recent.popitem(last=False)
    return mask


def causal_mask(sequences: Tensor, window: int | None) -> BlockMask:
    """Return which earlier tokens each token sees: of its own sequence, within the window.

    Args:
        sequences: int32 [s], the ascending number of each token's sequence.
    """
    reach = torch.full((), _FAR if window is None else window, dtype=torch.int32, device=sequences.device)

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < reach) & (sequences[q] == sequences[k])

    length = len(sequences)
    starts = torch.arange(0, length, BLOCK, device=sequences.device)
    ends = (starts + BLOCK - 1).clamp(max=length - 1)
    first, last = sequences[starts], sequences[ends]
    rows, columns = starts[:, None], starts[None]
    seen = (columns <= rows) & (last[None] >= first[:, None]) & (rows - ends[None] < reach)
    whole = (columns < rows) & (first[None] == last[:, None]) & (ends[:, None] - columns < reach)
    lengths = (length, length)
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of each row, and their columns first."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None].contiguous()
