"""Attention by FlashAttention 4 in the place of Transformer Engine's; in half precision, without dropout.

Drop-in replacements for megatron-core's core attention. t: packed tokens, s: tokens of a sample, b: samples, n: heads,
g: query groups, d: head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.compat import flash_attention_4
from llava_mcore.models.attention.sdpa import as_sequences, bounds_of_samples


def replaces_engine(config: TransformerConfig) -> bool:
    """Return whether attention may be computed by the classes of this file in place of Transformer Engine's."""
    in_half = config.params_dtype in (torch.float16, torch.bfloat16)
    return config.transformer_impl == "transformer_engine" and in_half and not config.attention_dropout


def decoder_uses_flash_attention(config: TransformerConfig) -> bool:
    """Return whether FlashAttention 4 computes a decoder's attention: cuDNN, which takes longer, is not asked for,
    heads need no padding, and there are no windows, context-parallel ranks or attention sinks."""
    cudnn = config.attention_backend is AttnBackend.fused
    fits = config.kv_channels % flash_attention_4.HEAD_MULTIPLE == 0
    plain = config.window_size is None and config.context_parallel_size == 1 and config.softmax_type == "vanilla"
    return replaces_engine(config) and not cudnn and fits and plain and flash_attention_4.supports(config.kv_channels)


def describe_flash_attention(parts: Mapping[str, nn.Module | None]) -> str:
    """Return what a run's log says about the parts of a model whose attention FlashAttention 4 computes, or nothing."""
    uses = [name for name, part in parts.items() if part and any(isinstance(x, FlashAttention) for x in part.modules())]
    return f", attention of the {' and the '.join(uses)} by FlashAttention 4" if uses else ""


class PackedAttention(MegatronModule):
    """Attention within packed sequences."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,  # a mask type and a bias, which these layers do not need
    ) -> Tensor:
        """Return [t, n*d] for [t, n or g, d]; [s, b, n*d] for [s, b, n or g, d] if nothing is packed."""
        if attention_mask is not None:
            raise ValueError("packed attention takes no explicit mask: causality and packing define it")
        if packed_seq_params is not None:
            bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            assert bounds is not None and longest is not None and packed_seq_params.cu_seqlens_q_padded is None
            return self.attend(query, key, value, bounds, longest).flatten(1)
        s, b = query.shape[:2]
        bounds = bounds_of_samples(query)
        out = self.attend(as_sequences(query), as_sequences(key), as_sequences(value), bounds, s)
        return out.view(b, s, -1).transpose(0, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Return [t, n, d] for [t, n or g, d].

        Args:
            bounds: int32 [sequences + 1], where sequences begin, and the end of the last.
            longest: no sequence is longer.
        """
        raise NotImplementedError


class FlashAttention(PackedAttention):
    """Full or causal attention. `padded_head`: the size of heads in the kernel, which they may have already, with zeros
    at their end."""

    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType = AttnMaskType.no_mask,
        softmax_scale: float | None = None,
        **_: Any,  # arguments that only other back ends use
    ) -> None:
        super().__init__(config=config)
        self.head_size = config.kv_channels
        self.padded_head = flash_attention_4.padded_head(self.head_size)
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.deterministic = bool(config.deterministic_mode)
        self.scale = softmax_scale or config.softmax_scale or 1.0 / math.sqrt(self.head_size)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Return [t, n, d] for [t, n or g, d], or heads of padded_head."""
        out = flash_attention_4.attend_packed(
            query, key, value, bounds, longest, scale=self.scale, causal=self.causal, deterministic=self.deterministic
        )
        return out[..., : self.head_size]
