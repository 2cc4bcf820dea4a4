"""Terms beside the cross-entropy, computed from the same chunks of logits; torch's autograd gives their gradients.

A term is a function of a chunk that returns a value per token. It is weighted by the loss mask as the cross-entropy is,
reported under its name, and added to what is minimized if it has a coefficient. It costs another chunk of logits in
memory, and what its operations cost: the cross-entropy's kernels stay as they are.

c: tokens of a chunk, rows: this rank's rows of the true vocabulary, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.parallel.named_sums import add_sum

if TYPE_CHECKING:
    from llava_mcore.models.loss.linear_cross_entropy import ChunkLoss, VocabShard


@dataclass(frozen=True)
class ChunkLogits:
    """The logits of some tokens. All tensors but `local` can be differentiated.

    logits: fp32 (fp64 for fp64) [c, rows]. log_sum: [c], their log-sum-exp over the whole vocabulary.
    local: int64 [c], the label's row here, or -1 if another rank has it. group: the tensor-parallel group.

    With tensor parallelism all ranks must return the same values. A term of `log_sum` alone does. A sum over `logits`
    goes through megatron-core's `reduce_from_tensor_model_parallel_region`; `log_sum` goes through
    `copy_to_tensor_model_parallel_region` before it is combined with them.
    """

    logits: Tensor
    log_sum: Tensor
    local: Tensor
    group: dist.ProcessGroup


TokenTerm = Callable[[ChunkLogits], Tensor]
"""Returns a value per token, [c], of a chunk."""


@dataclass(frozen=True)
class LossTerm:
    """A term and its weight beside the cross-entropy; None: it is only reported."""

    values: TokenTerm
    coefficient: float | None


def add_terms(
    terms: Mapping[str, LossTerm], logits: Tensor, chunk: ChunkLoss, weights: Tensor, shard: VocabShard
) -> Tensor | None:
    """Report the terms of a chunk; return the gradient of their sum by the logits, or None if none has a coefficient.

    Args:
        logits: [c, padded rows].
        weights: [c], of the tokens in the reported sums. The gradient is that of unweighted tokens.
    """
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_(any(term.coefficient is not None for term in terms.values()))
        rows = leaf[:, : shard.num_true]
        content = ChunkLogits(rows, _LogSum.apply(rows, chunk.log_sum), chunk.local, shard.group)
        objective: Tensor | None = None
        for name, term in terms.items():
            values = term.values(content)
            add_sum(name, (values.detach() * weights).sum(), weights.sum())
            if term.coefficient is not None:
                weighted = term.coefficient * values.sum()
                objective = weighted if objective is None else objective + weighted
    return None if objective is None else torch.autograd.grad(objective, leaf)[0]


class _LogSum(torch.autograd.Function):
    """logits [c, rows], their log-sum-exp over all ranks' rows [c] → the latter, differentiable by the former."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_sum: Tensor) -> Tensor:
        ctx.save_for_backward(logits, log_sum)
        return log_sum.view_as(log_sum)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, log_sum = ctx.saved_tensors
        return (logits - log_sum.unsqueeze(1)).exp() * grad.unsqueeze(1), None
