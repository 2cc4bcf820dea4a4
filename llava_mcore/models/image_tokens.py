"""Features of images at the places of their tokens.

s: tokens, b: samples, i: tiles, n: features per tile, h: language hidden size.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from torch import Tensor


def insert_features(embeddings: Tensor, features: Tensor, positions: Tensor, *, is_part: bool = False) -> Tensor:
    """Copy image features [i * n, h] over the embeddings [s, b, h] at flat [b * s] indices; no host sync.

    Args:
        is_part: context-parallel ranks divide the tokens: the index b * s stands for those of other ranks.
    """
    s, b, h = embeddings.shape
    flat = embeddings.transpose(0, 1).reshape(b * s, h)
    if is_part:  # a row that is dropped
        flat = torch.nn.functional.pad(flat, (0, 0, 0, 1))
    # index_copy keeps the gradient of an empty `features` connected, which an early return would not.
    placed = flat.index_copy(0, positions, features.to(flat.dtype))
    return placed[: b * s].view(b, s, h).transpose(0, 1).contiguous()


def scatter_each(x: Tensor) -> Tensor:
    """Return this rank's part [k, s / tp, b, h] of [k, s, b, h]."""
    return torch.stack([tensor_parallel.scatter_to_sequence_parallel_region(part) for part in x.unbind()])
