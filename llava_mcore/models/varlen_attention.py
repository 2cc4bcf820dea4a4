"""Causal attention by torch's kernel for packed sequences, in half precision on GPUs.

s: sequence, b: batch, t: packed tokens, n: heads, g: query groups, d: head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

LONGEST_HEAD = 256
"""Head size up to which torch's kernel for packed sequences exists."""


def kernel_takes(query: Tensor) -> bool:
    """Return whether the kernel takes such queries."""
    in_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and in_half and query.shape[-1] <= LONGEST_HEAD


def attend_rows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Return [s, b, n*d] for [s, b, n, d] and keys, values [k, b, g, d], of which the queries are the last tokens."""
    (s, b), num_keys = q.shape[:2], len(k)
    bounds, of_keys = (torch.arange(0, b * x + 1, x, dtype=torch.int32, device=q.device) for x in (s, num_keys))
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    out = attend_packed(q, k, v, bounds, s, scale=scale, window=window, of_keys=(of_keys, num_keys))
    return out.unflatten(0, (b, s)).transpose(0, 1)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
    of_keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return [t, n*d] for [t, n or g, d].

    Args:
        bounds: int32 [sequences + 1], the last of which is t.
        longest: length of the longest sequence.
        of_keys: bounds and longest length of the keys of each sequence, of which the queries are the last tokens; None:
            as many as queries.
    """
    key_bounds, most_keys = (bounds, longest) if of_keys is None else of_keys
    # A window is counted from the last key, in FlashAttention alone; cuDNN's causality begins at the first one.
    all_keys = -1 if of_keys is None else most_keys
    seen = (all_keys if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, bounds, key_bounds, longest, most_keys, scale=scale, window_size=seen)
    assert isinstance(out, Tensor)
    return out.flatten(1)
