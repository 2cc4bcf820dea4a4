"""The output layer and its cross-entropy together, in chunks of tokens, so that all logits never exist at once.

The function differentiates the *weighted sum* of the token losses, whose weights (the loss mask) are known in the
forward pass. So a chunk's logits become its share of both gradients at once, with three matrix products per chunk as
in the plain head, and the backward pass only multiplies by one number. A per-token result would need the logits again
in the backward pass: a fourth product, a third more work.

In training that number is 1, except with the loss scale of fp16. So the weight's gradient need not wait for it: each
chunk adds its share to the weight's `main_grad`, megatron-core's sum over micro-batches.

megatron-core 0.19 has no such function: its cross-entropies (its own, fused, Transformer Engine's) take logits.

Tokens that are not trained (prompts, images, padding) do not need logits: if the host knows the number of trained
tokens, only they get logits.

s: tokens, b: samples, h: hidden size, t: s * b, c: tokens of a chunk, rows: padded vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from llava_mcore.compat.torch import assert_on_device
from llava_mcore.models.kernels import chunk_operations
from llava_mcore.models.kernels.chunk_operations import add_product, product, put_rows, scaled, wide_type
from llava_mcore.models.loss.terms import LossTerm, add_terms
from llava_mcore.models.main_grad import marked_as_added

# Every chunk reads and writes the fp32 weight gradient: 8 bytes per element, for which it does 2 * c operations. On an
# H200 (800 TF/s, 4.3 TB/s) both take the same time at c = 750. A larger chunk hides more of it, and costs 4 bytes per
# logit.
CHUNK_TOKENS = 2048
# The number of tokens in the head is rounded up to a multiple of this, for fewer shapes and faster products.
KEPT_MULTIPLE = 64


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer, which also returns the loss if targets are passed.

    It is a module, not a function that takes the weight, because data parallelism waits for a gathered weight in
    the hooks that run before a module's forward.
    """

    adds_to_main_grad = False
    """Whether a trained weight's gradient is added to its `main_grad` (see `linear_cross_entropy`)."""
    terms: Mapping[str, LossTerm] = {}
    """Terms beside the cross-entropy, by name."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        vocab_size: int = 0,
        num_trained: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Without labels like megatron-core's; with them `linear_cross_entropy` of the input [s, b, h]."""
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        assert token_weights is not None and self.bias is None
        return linear_cross_entropy(
            input_,
            self.weight if weight is None else weight,
            labels,
            token_weights,
            vocab_size=vocab_size,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            num_trained=num_trained,
            adds_to_main_grad=self.adds_to_main_grad,
            terms=self.terms,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    sequence_parallel: bool = False,
    num_trained: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    adds_to_main_grad: bool = False,
    terms: Mapping[str, LossTerm] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the cross-entropy of hidden @ weight.T, and each token's.

    No host synchronization. Gradients reach `hidden` (summed over the tensor-parallel ranks) and `weight`, each only
    if required; that of the weight is summed over chunks in fp32.

    Args:
        hidden: [s, b, h], the same on all ranks of `tp_group`; [s / tp, b, h] with sequence parallelism.
        weight: [rows / tp, h], this rank's part, in the same type as `hidden`.
        labels: int64 [b, s]. Ids outside the vocabulary must have weight 0.
        token_weights: [b, s], a constant. 0: not trained.
        vocab_size: rows of the true vocabulary; rows after it are padding and never get probability.
        tp_group: the tensor-parallel group, of any size.
        num_trained: number of tokens with a weight other than 0, if the host knows it: only these (and a few more,
            to a multiple of KEPT_MULTIPLE) get logits. The same on all ranks of `tp_group`. A number
            that is too small drops trained tokens.
        chunk_tokens: maximum number of tokens with logits at a time.
        adds_to_main_grad: the weight is a parameter of megatron-core's data parallelism, and if it is trained, the
            forward pass adds its gradient to `main_grad`. The gradient of the sum must be 1.
        terms: add their gradients to those of the sum, whose value they do not change; they are reported as named sums.

    Returns:
        The sum of token_weights * loss, [], and the loss of every token, [b, s], which has no gradient and is 0
        for dropped tokens; both in fp32 (fp64 for fp64).
    """
    # Every rank needs all tokens for its part of the vocabulary; backward, gradients are summed over the ranks.
    if tp_group.size() > 1:
        enter = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
        hidden = enter(hidden, group=tp_group)
    # Tokens in the order of `hidden`, [s * b].
    s, b, h = hidden.shape
    flat_weights = token_weights.transpose(0, 1).reshape(s * b)
    total, losses = _WeightedLossSum.apply(
        hidden.reshape(s * b, h),
        weight,
        labels.transpose(0, 1).reshape(s * b),
        flat_weights,
        _trained_rows(flat_weights, num_trained),
        VocabShard(weight.shape[0], vocab_size, tp_group),
        chunk_tokens,
        torch.is_grad_enabled(),
        adds_to_main_grad,
        terms or {},
    )
    return total, losses.view(s, b).transpose(0, 1)


def _trained_rows(token_weights: Tensor, num_trained: int | None) -> Tensor | None:
    """Return the indices in [t] of the tokens with a weight and of some without; None for all. No host sync."""
    num_tokens = token_weights.shape[0]
    if num_trained is None:
        return None
    num_kept = max(1, math.ceil(num_trained / KEPT_MULTIPLE)) * KEPT_MULTIPLE
    if num_kept >= num_tokens:
        return None
    return (token_weights == 0).to(torch.uint8).argsort(stable=True)[:num_kept]


class _WeightedLossSum(torch.autograd.Function):
    """hidden: [t, h], weight: [rows / tp, h], labels, token_weights: [t], kept: [k] or None → sum [], losses [t]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        trained_rows: Tensor | None,
        shard: VocabShard,
        chunk_tokens: int,
        grad_enabled: bool,
        adds_to_main_grad: bool,
        terms: Mapping[str, LossTerm],
    ) -> tuple[Tensor, Tensor]:
        # Gradients are computed here, while a chunk's logits exist, and only scaled in the backward pass.
        losses = hidden.new_zeros(hidden.shape[0], dtype=wide_type(hidden.dtype))
        token_weights = token_weights.to(losses.dtype)
        wants = [grad_enabled and needed for needed in ctx.needs_input_grad[:2]]
        # An fp16 gradient may be too small before it is scaled, so it stays wide until then.
        grad_dtype = losses.dtype if hidden.dtype == torch.float16 else hidden.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=grad_dtype) if wants[0] else None
        is_added = adds_to_main_grad and wants[1]
        grad_weight: Tensor | None = vars(weight)["main_grad"] if is_added else None
        for place in _chunks(hidden.shape[0] if trained_rows is None else trained_rows, chunk_tokens):
            # Forward: logits, losses and further terms of a chunk.
            part, part_weights = hidden[place], token_weights[place].unsqueeze(1)
            logits = product(part, weight.t())
            chunk = chunk_loss(logits, labels[place], shard)
            put_rows(losses, place, chunk.losses)
            added = add_terms(terms, logits, chunk, part_weights.squeeze(1), shard) if terms else None
            if any(wants):
                # Backward: the logits' memory becomes that of their gradients.
                grad_logits = into_gradients(logits, chunk, shard, hidden.dtype)
                if added is not None:
                    grad_logits += added
                if grad_hidden is not None:
                    put_rows(grad_hidden, place, product(grad_logits, weight).mul_(part_weights))
                if wants[1]:
                    weighted = torch.mul(part, part_weights, out=torch.empty_like(part))
                    grad_weight = add_product(grad_weight, grad_logits.t(), weighted)
                del grad_logits
            del logits, added  # never those of two chunks at a time
        ctx.save_for_backward(grad_hidden, None if is_added else grad_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.added = weight if is_added else None
        ctx.mark_non_differentiable(losses)
        return (losses * token_weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        grad_hidden, grad_weight = (None if g is None else scaled(g, grad_total, dtype) for g, dtype in saved)
        if ctx.added is not None:
            assert_on_device(grad_total == 1, "the output layer's gradient was added before the loss was scaled")
            grad_weight = marked_as_added(ctx.added)
        return grad_hidden, grad_weight, *[None] * 8


def _chunks(tokens: Tensor | int, chunk_tokens: int) -> Iterator[Tensor | slice]:
    """Split the kept indices, or a range from 0, into the fewest chunks of nearly the same size."""
    num_tokens = tokens if isinstance(tokens, int) else tokens.shape[0]
    num_chunks = -(-num_tokens // chunk_tokens)
    bounds = [num_tokens * i // num_chunks for i in range(num_chunks + 1)]
    for start, end in itertools.pairwise(bounds):
        yield slice(start, end) if isinstance(tokens, int) else tokens[start:end]


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
        log_sum, target = chunk_operations.log_sum_and_target(logits, local, shard.num_true)
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
    return chunk_operations.torch_gradients(logits, chunk.local, chunk.log_sum, at_target, shard.num_true, dtype)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def _over_vocabulary(log_sum: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Combine every rank's log-sum-exp and target logit, [c] each, in one collective."""
    local = torch.stack([log_sum, target])
    gathered = local.new_empty(2 * group.size(), local.shape[1])
    dist.all_gather_into_tensor(gathered, local, group=group)
    return gathered[0::2].logsumexp(dim=0), gathered[1::2].sum(dim=0)
