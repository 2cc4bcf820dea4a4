"""The embedding of tokens, whose gradient is added to `main_grad` without the rows of other tokens.

Autograd's gradient has all rows of the vocabulary, of which a micro-batch needs few: clearing it and adding it takes
time with every micro-batch.

t: tokens, h: hidden size, rows: padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import VocabParallelEmbedding, reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from llava_mcore.models.main_grad import marked_as_added


class TokenEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding."""

    adds_to_main_grad = False
    """Whether a trained weight's gradient is added to its `main_grad`."""

    def forward(self, input_: Tensor) -> Tensor:
        """Return [b, s, h] for ids int64 [b, s]. A collective call of the tensor-parallel ranks."""
        if not (self.adds_to_main_grad and self.weight.requires_grad and torch.is_grad_enabled()):
            output: Tensor = super().forward(input_)
            return output
        if self.tp_group.size() == 1:
            return Lookup.apply(self.weight, input_)
        # Each rank has the rows of its own ids, and zeros for those of the others.
        is_others = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local = (input_ - self.vocab_start_index).masked_fill(is_others, 0)
        part = Lookup.apply(self.weight, local).masked_fill(is_others[..., None], 0)
        summed: Tensor = reduce_from_tensor_model_parallel_region(part, group=self.tp_group)
        return summed


class Lookup(torch.autograd.Function):
    """Rows of a weight [rows, h], whose gradient is added to its `main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        """Return [..., h] for ids int64 [...]."""
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Add the gradient, and return what stands for it."""
        (ids,) = ctx.saved_tensors
        rows, sums = sums_of_rows(ids.flatten(), gradient.flatten(0, -2))
        total: Tensor = vars(ctx.weight)["main_grad"]
        total.index_add_(0, rows, sums.to(total.dtype))
        return marked_as_added(ctx.weight), None


def sums_of_rows(ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids that occur, int64 [t], and the sums of their gradients [t, h], with the bits of torch's embedding.
    The host waits for nothing, so there are t of both: zeros for row 0 at the end.

    Args:
        ids: int64 [t].
        gradient: [t, h].
    """
    in_order, order = ids.sort(stable=True)
    is_new = F.pad(in_order[1:] != in_order[:-1], (1, 0))
    index = is_new.cumsum(0)  # of each token's id among those that occur
    places = torch.empty_like(ids).scatter_(0, order, index)
    sums: Tensor = torch.ops.aten.embedding_dense_backward(gradient, places, len(ids), -1, False)
    return torch.zeros_like(ids).scatter_(0, index, in_order), sums
