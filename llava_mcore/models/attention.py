"""A core attention for megatron-core's local (non Transformer Engine) layers on torch's SDPA.

megatron-core's own unfused attention holds the whole [b, n, s, s] score matrix and knows no packed sequences.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SDPAttention(MegatronModule):
    """Causal or full attention with grouped queries; packed sequences attend within themselves only.

    Drop-in for megatron-core's DotProductAttention. s: sequence, b: batch, t: packed tokens, n: heads,
    g: query groups, d: head size.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,  # arguments that only other back ends use
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("SDPAttention has no context parallelism")
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [s, b, n*d] for [s, b, n or g, d]; [t, n*d] for packed [t, n or g, d]."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("SDPAttention takes no explicit mask: causality and packing decide what is seen")
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        if self.dropout and self.training:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return self._attend(query, key, value)
        return self._attend(query, key, value)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams) -> Tensor:
        padded = params.cu_seqlens_q_padded
        bounds = (params.cu_seqlens_q if padded is None else padded).tolist()
        spans = [slice(a, b) for a, b in pairwise(bounds) if b > a]
        parts = [self._attend(query[x, None], key[x, None], value[x, None]).squeeze(1) for x in spans]
        tail = query.shape[0] - bounds[-1]  # padding outside every sample
        if tail:
            parts.append(query.new_zeros(tail, query.shape[1] * query.shape[2]))
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, n, s, d]
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)
