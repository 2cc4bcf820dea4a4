"""The cross-entropy of a chunk of logits, and its gradients in place of the logits.

c: tokens, rows: padded vocabulary, divided over tp ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class VocabShard:
    """This rank's rows of the vocabulary."""

    def __init__(self, num_rows: int, vocab_size: int, group: dist.ProcessGroup) -> None:
        self.num_rows, self.group = num_rows, group
        self.first = num_rows * group.rank()
        self.num_true = min(max(vocab_size - self.first, 0), num_rows)


@dataclass(frozen=True)
class ChunkLoss:
    """losses, log_sum: [c], of the whole vocabulary; local: int64 [c], the label's row here, or -1 if the label is
    outside this rank's unpadded vocabulary shard."""

    losses: Tensor
    log_sum: Tensor
    local: Tensor


def chunk_loss(logits: Tensor, labels: Tensor, shard: VocabShard) -> ChunkLoss:
    """Return the losses of one chunk. Logits [c, rows / tp] are fp32 or fp64; labels: int64 [c]."""
    local = labels - shard.first
    local = local.where((local >= 0) & (local < shard.num_true), -1)  # neither other ranks' rows nor padding
    if _has_kernels(logits):
        from llava_mcore.models.kernels import logit_gradients  # on GPUs only

        log_sum, target = logit_gradients.log_sum_and_target(logits, local, shard.num_true)
    else:
        log_sum, target = log_sum_and_target(logits, local, shard.num_true)
    if shard.group.size() > 1:
        log_sum, target = _over_vocabulary(log_sum, target, shard.group)
    return ChunkLoss(log_sum - target, log_sum, local)


def into_gradients(logits: Tensor, chunk: ChunkLoss, shard: VocabShard, dtype: torch.dtype) -> Tensor:
    """Return the gradients of the losses, [c, rows / tp] of `dtype`: probabilities minus one-hot labels.

    The logits are overwritten. Their rows may be further apart than they are long.
    """
    at_target = (-chunk.losses).expm1()  # more exact than exp(..) - 1
    if _has_kernels(logits) and dtype in (torch.bfloat16, torch.float16):
        from llava_mcore.models.kernels import logit_gradients  # on GPUs only

        return logit_gradients.into_gradients(logits, chunk.local, chunk.log_sum, at_target, shard.num_true, dtype)
    return torch_gradients(logits, chunk.local, chunk.log_sum, at_target, shard.num_true, dtype)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def log_sum_and_target(logits: Tensor, local: Tensor, num_true: int) -> tuple[Tensor, Tensor]:
    """Compute the same as the kernel of this name, by torch's operations."""
    index, is_mine = _local_index(local, logits.shape[1])
    return logits[:, :num_true].logsumexp(dim=-1), logits.gather(1, index).where(is_mine, 0.0).squeeze(1)


def torch_gradients(
    logits: Tensor, local: Tensor, log_sum: Tensor, at_target: Tensor, num_true: int, dtype: torch.dtype
) -> Tensor:
    """Compute the same as `logit_gradients.into_gradients`, by torch's operations; for any type."""
    logits[:, num_true:] = -torch.inf
    logits -= log_sum.unsqueeze(1)
    index, is_mine = _local_index(local, logits.shape[1])
    at_index = at_target.unsqueeze(1).where(is_mine, logits.gather(1, index).exp())
    out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    torch.exp(logits, out=out)
    return out.scatter_(1, index, at_index.to(dtype))


def _local_index(local: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return a row of this rank, [c, 1], and whether it is the label's; else it is an arbitrary one."""
    is_mine = (local >= 0) & (local < num_rows)
    return local.clamp(0, num_rows - 1).unsqueeze(1), is_mine.unsqueeze(1)


def _over_vocabulary(log_sum: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Combine every rank's log-sum-exp and target logit, [c] each, in one collective."""
    local = torch.stack([log_sum, target])
    gathered = local.new_empty(2 * group.size(), local.shape[1])
    dist.all_gather_into_tensor(gathered, local, group=group)
    return gathered[0::2].logsumexp(dim=0), gathered[1::2].sum(dim=0)
