"""Self-attention that normalizes queries and keys over all heads together (InternViT-6B).

s: positions, b: images, n: heads of this tensor-parallel rank, d: head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

EPS = 1e-6
"""Epsilon of these norms in transformers, which has no setting for it."""


class AllHeadsNorm(nn.Module):
    """RMSNorm over the heads of all ranks. Every rank has the whole weight; its gradient is summed over them."""

    def __init__(self, size: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        """size: of all heads. group: the ranks that divide them."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return the heads [s, b, n, d], rounded as transformers does."""
        weight, wide = self.weight, x.float()
        squares = wide.pow(2).sum((-2, -1), keepdim=True)
        if self.group.size() > 1:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.group)
            # Each rank has a part of the sum, and what depends on the sum in its own heads.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        local_weight = weight.chunk(self.group.size())[self.group.rank()].view(x.shape[-2:])
        return local_weight * (wide * torch.rsqrt(squares / len(self.weight) + EPS)).to(x.dtype)


class NormedHeadsAttention(SelfAttention):
    """Self-attention with `query_norm` and `key_norm`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = self.config.num_attention_heads * self.hidden_size_per_attention_head
        norms = (AllHeadsNorm(size, self.config.params_dtype, self.pg_collection.tp) for _ in range(2))
        self.query_norm, self.key_norm = norms

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return query, key and value [s, b, n, d], the first two normalized (called by megatron-core's forward)."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        return (self.query_norm(query), self.key_norm(key), *rest)
