"""Attention of towers on GPUs where Transformer Engine would choose slower kernels; in half precision, no dropout.

Drop-in replacements for megatron-core's core attention. t: packed patches, n: heads, d: head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from llava_mcore.compat import flash_attention_4

HEAD_SIZES_OF_CUDNN = (64, 128)
"""cuDNN pads others to the next, such as 72 (Qwen3-VL) and 80 (Qwen2.5-VL)."""


def replaces_engine(config: TransformerConfig) -> bool:
    """Return whether attention may be computed by the classes of this file in place of Transformer Engine's."""
    in_half = config.params_dtype in (torch.float16, torch.bfloat16)
    return config.transformer_impl == "transformer_engine" and in_half and not config.attention_dropout


def uses_flash_attention(config: TransformerConfig) -> bool:
    """Return whether FlashAttention 4 computes attention within whole images: neither is cuDNN asked for, nor has it
    kernels for such heads."""
    cudnn = config.attention_backend is AttnBackend.fused or config.kv_channels in HEAD_SIZES_OF_CUDNN
    return replaces_engine(config) and not cudnn and flash_attention_4.supports(config.kv_channels)


def tower_attention(config: TransformerConfig, *, sees_windows: bool) -> MegatronModule | None:
    """Return what computes the attention of a tower's layer; None: what megatron-core has built."""
    if sees_windows:
        return ManyShortAttention(config) if replaces_engine(config) else None
    return FlashAttention(config) if uses_flash_attention(config) else None


def kernels_of(model: nn.Module) -> str:
    """Return what a run says about the attention of its tower, or nothing."""
    uses = any(isinstance(module, FlashAttention) for module in model.modules())
    return ", attention to images by FlashAttention 4" if uses else ""


class PackedAttention(MegatronModule):
    """Attention within packed sequences."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,  # a mask type and a bias, which full attention does not need
    ) -> Tensor:
        """Return [t, n*d] for [t, n, d]."""
        bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        assert bounds is not None and longest is not None
        return self.attend(query, key, value, bounds, longest).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Return [t, n, d] for [t, n, d].

        Args:
            bounds: int32 [sequences + 1], where sequences begin, and the end of the last.
            longest: no sequence is longer.
        """
        raise NotImplementedError


class FlashAttention(PackedAttention):
    """Attention within images by FlashAttention 4, which pads heads less than cuDNN. `padded_head`: their size then,
    which they may have already, with zeros at their end."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.head_size = config.kv_channels
        self.padded_head = flash_attention_4.padded_head(self.head_size)
        self.deterministic = bool(config.deterministic_mode)
        self.scale = config.softmax_scale or 1.0 / math.sqrt(self.head_size)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Return [t, n, d] for [t, n, d] or [t, n, padded_head]."""
        out = flash_attention_4.attend_packed(
            query, key, value, bounds, longest, scale=self.scale, deterministic=self.deterministic
        )
        return out[..., : self.head_size]


class ManyShortAttention(PackedAttention):
    """Attention in packs of many short sequences.

    Transformer Engine has cuDNN plan for as many sequences as there are, each as long as all together: with 600
    windows of 64 patches one of its kernels took half of a step. Sequences that fit into a block have a kernel of their
    own, longer ones torch's.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Return [t, n, d] for [t, n, d]."""
        from llava_mcore.models.kernels import window_attention  # on GPUs only

        if longest <= window_attention.LONGEST:
            out = window_attention.WindowAttention.apply(query, key, value, bounds)
        else:
            out = varlen_attn(query, key, value, bounds, bounds, longest, longest)
        assert isinstance(out, Tensor)
        return out
