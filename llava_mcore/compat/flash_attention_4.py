"""FlashAttention 4: the package flash-attn-4, whose kernels are compiled when they first run. Written for 4.0.0b36.

Its module is `flash_attn.cute`; other versions of FlashAttention are other modules of `flash_attn`.
"""

from __future__ import annotations

import functools
import logging
import os
from importlib.metadata import PackageNotFoundError, distribution

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

HEAD_MULTIPLE = 32
"""Heads are padded to a multiple of this. With others the gradients of queries are wrong on Hopper, without a message
(4.0.0b8 to b36; Dao-AILab/flash-attention, pull request 2896)."""
LARGEST_HEAD = 128
HOPPER = (9, 0)


@functools.cache
def is_usable() -> bool:
    """Return whether the package is installed and can be imported. Log why it cannot."""
    try:
        distribution("flash-attn-4")
        from flash_attn.cute import flash_attn_varlen_func  # noqa: F401
    except PackageNotFoundError:
        return False
    except (ImportError, OSError, AttributeError) as error:  # its compiler's libraries, or another version of them
        logger.warning(
            'flash-attn-4 is installed and cannot be imported, so it is not used: %s; pip install "llava-mcore[flash]"',
            error,
        )
        return False
    return True


def supports(head_size: int) -> bool:
    """Return whether its kernels can compute on this process's GPU with heads of a size, padded."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
    return on_hopper and head_size <= LARGEST_HEAD and is_usable()


def keep_from_engine(head_size: int) -> None:
    """Keep Transformer Engine from choosing this package in the process, if it would not pad heads of a size."""
    if head_size % HEAD_MULTIPLE:
        os.environ["NVTE_FLASH_ATTN_V4"] = "0"


def padded_head(size: int) -> int:
    """Return the size that heads are padded to."""
    return -(-size // HEAD_MULTIPLE) * HEAD_MULTIPLE


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float,
    causal: bool,
    deterministic: bool,
) -> Tensor:
    """Return attention [t, n, d] within packed sequences, for queries [t, n, d] and keys, values [t, g, d] in half
    precision.

    Args:
        bounds: int32 [sequences + 1], where sequences begin, and the end of the last.
        longest: no sequence is longer.
        scale: of products of queries and keys.
        causal: tokens see those before them and themselves, else all of their sequence.
        deterministic: gradients have the same bits in every run, which takes longer.
    """
    from flash_attn.cute import flash_attn_varlen_func

    result = flash_attn_varlen_func(
        *_padded(query, key, value),
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=causal,
        deterministic=deterministic,
    )
    return _output(result, query)


def _padded(*parts: Tensor) -> list[Tensor]:
    """Return heads with zeros at their end."""
    missing = padded_head(parts[0].shape[-1]) - parts[0].shape[-1]
    return [F.pad(x, (0, missing)) if missing else x for x in parts]


def _output(result: Tensor | tuple[Tensor, Tensor | None], query: Tensor) -> Tensor:
    """Return the output without padding, and without the logarithms of sums that some versions return beside it."""
    out = result[0] if isinstance(result, tuple) else result
    return out[..., : query.shape[-1]]
