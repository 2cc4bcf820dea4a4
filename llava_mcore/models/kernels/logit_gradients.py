"""Kernels for the cross-entropy of a chunk of logits: two reads and one write, where torch's operations take nine.

Gradients in bf16 or fp16 overwrite the fp32 logits, since a chunk of both would need half as much memory again.

c: tokens, rows: this rank's rows of the padded vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)


def log_sum_and_target(logits: Tensor, local: Tensor, num_true: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of the first `num_true` logits and the logit of the label, fp32 [c] each.

    Args:
        logits: fp32 [c, rows], contiguous.
        local: int64 [c], the label's row on this rank. Outside of 0 to rows - 1, the logit of the label is 0.
    """
    num_tokens, rows = logits.shape
    log_sum, target = logits.new_empty(num_tokens), logits.new_empty(num_tokens)
    _log_sum_and_target[(num_tokens,)](
        logits, local, log_sum, target, ROWS=rows, NUM_TRUE=num_true, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return log_sum, target


def into_gradients(
    logits: Tensor, local: Tensor, log_sum: Tensor, at_target: Tensor, num_true: int, dtype: torch.dtype
) -> Tensor:
    """Overwrite logits with the gradients of the losses: probabilities, and `at_target` for the label.

    Args:
        logits, local, num_true: as above.
        log_sum: fp32 [c], over the whole vocabulary.
        at_target: fp32 [c], the gradient of the label's logit.
        dtype: bf16 or fp16.

    Returns:
        [c, rows] of `dtype`, each row in the first half of its logits' memory.
    """
    num_tokens, rows = logits.shape
    gradients = logits.view(dtype)
    _into_gradients[(num_tokens,)](
        logits, gradients, local, log_sum, at_target, ROWS=rows, NUM_TRUE=num_true, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return gradients[:, :rows]


@triton.jit
def _log_sum_and_target(
    logits: tl.tensor,
    local: tl.tensor,
    log_sum: tl.tensor,
    target: tl.tensor,
    ROWS: tl.constexpr,
    NUM_TRUE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    logits += token * ROWS
    columns = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), _LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, NUM_TRUE, BLOCK):
        values = tl.load(logits + first + columns, mask=first + columns < NUM_TRUE, other=-float("inf"))
        larger = tl.maximum(largest, values)
        total = total * tl.exp(largest - larger) + tl.exp(values - larger)
        largest = larger
    top = tl.max(largest, axis=0)
    tl.store(log_sum + token, top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0)))
    label = tl.load(local + token)
    is_mine = (label >= 0) & (label < ROWS)
    tl.store(target + token, tl.load(logits + label, mask=is_mine, other=0.0))


@triton.jit
def _into_gradients(
    logits: tl.tensor,
    gradients: tl.tensor,
    local: tl.tensor,
    log_sum: tl.tensor,
    at_target: tl.tensor,
    ROWS: tl.constexpr,
    NUM_TRUE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    logits += token * ROWS
    gradients += token * ROWS * 2
    columns = tl.arange(0, BLOCK)
    log_total, label, of_label = tl.load(log_sum + token), tl.load(local + token), tl.load(at_target + token)
    for first in range(0, ROWS, BLOCK):
        here = first + columns
        values = tl.exp(tl.load(logits + here, mask=here < NUM_TRUE, other=-float("inf")) - log_total)
        values = tl.where(here == label, of_label, values)
        tl.debug_barrier()  # the first block's gradients replace its own logits: all threads have read them
        tl.store(gradients + here, values, mask=here < ROWS)
