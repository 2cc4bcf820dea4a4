"""Causal attention on GPUs with windows and packed sequences, by torch's fused kernel.

Nothing of the size of the scores is kept, and the host never waits: boundaries of packed sequences stay on the device.

s: tokens, b: batch, t: packed tokens, n: heads, g: query groups, d: head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

LONGEST_HEAD = 256
"""Head size up to which the kernel exists."""


def fits(query: Tensor) -> bool:
    """Return whether the kernel takes such queries."""
    in_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and in_half and query.shape[-1] <= LONGEST_HEAD


def attend_rows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Return [s, b, n*d] for [s, b, n or g, d]."""
    s, b = q.shape[:2]
    bounds = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=q.device)
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    out = attend_packed(q, k, v, bounds, s, scale=scale, window=window)
    return out.unflatten(0, (b, s)).transpose(0, 1)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float, window: int | None
) -> Tensor:
    """Return [t, n*d] for [t, n or g, d]. bounds: int32 [sequences + 1], the last of which is t."""
    seen = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=seen)
    assert isinstance(out, Tensor)
    return out.flatten(1)
