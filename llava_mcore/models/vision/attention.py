"""Attention of towers on GPUs where Transformer Engine would choose slower kernels; in half precision, no dropout.

t: packed patches, n: heads, d: head size.
"""

from __future__ import annotations

from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from llava_mcore.compat import flash_attention_4
from llava_mcore.models.attention.flash import FlashAttention, PackedAttention, replaces_engine

HEAD_SIZES_OF_CUDNN = (64, 128)
"""cuDNN pads others to the next, such as 72 (Qwen3-VL) and 80 (Qwen2.5-VL)."""


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
