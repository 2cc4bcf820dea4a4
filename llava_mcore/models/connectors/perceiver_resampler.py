"""Idefics2's resampler: latents that read the features of packed images.

Attention keeps images apart by their lengths.

p: images, n: features of all images, l: latents of an image, w: the tower's width, h: the language model's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.errors import ConversionError
from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.models.language.layers import column_linear, row_linear
from llava_mcore.models.norms import TorchNorm


@dataclass(frozen=True)
class LatentReads:
    """The order in which the latents read: the features of the first image, its latents, those of the second, …

    `order`: int64 [n + p * l], indices into all features followed by all latents. `lengths`: where images begin,
    among latents and in what they read.
    """

    order: Tensor
    lengths: PackedSeqParams

    @classmethod
    def of(cls, seqlens: Tensor, num_features: int, num_latents: int, max_seqlen: int) -> LatentReads:
        """Build it on the device of seqlens, without waiting for it.

        Args:
            seqlens: int32 [p].
            num_features: n.
            num_latents: l.
            max_seqlen: the largest of seqlens.
        """
        # Each image's latents are placed after its features, so that one call attends over both.
        images = torch.arange(len(seqlens), device=seqlens.device)
        owner = images.repeat_interleave(seqlens, output_size=num_features)  # of each feature
        after = seqlens.cumsum(0)[:, None] + torch.arange(num_latents, device=seqlens.device)
        targets = torch.cat(
            [
                torch.arange(num_features, device=seqlens.device) + num_latents * owner,
                (after + num_latents * images[:, None]).flatten(),
            ]
        )
        # Latents ask, features and latents answer: two lists of bounds.
        bounds = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        asking = torch.arange(len(seqlens) + 1, dtype=torch.int32, device=seqlens.device) * num_latents
        lengths = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=asking,
            cu_seqlens_kv=bounds + asking,
            max_seqlen_q=num_latents,
            max_seqlen_kv=max_seqlen + num_latents,
        )
        return cls(
            torch.empty_like(targets).scatter_(0, targets, torch.arange(len(targets), device=seqlens.device)), lengths
        )


class PerceiverResampler(MegatronModule):
    """The whole connector; latents and norms are the same on every tensor-parallel rank."""

    def __init__(
        self, config: TransformerConfig, projection: TransformerConfig, *, input_size: int, num_latents: int
    ) -> None:
        """config: of the latents' layers. projection: config of the MLP before them, which reads input_size values."""
        super().__init__(config=config)
        self.modality_projection = _gated_mlp(projection, input_size)
        self.latents = nn.Parameter(torch.ones(num_latents, config.hidden_size, dtype=config.params_dtype))
        self.layers = PerceiverLayers(config)
        self.norm = _norm(config)

    def forward(self, features: Tensor, seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Return [p, l, h] of features [n, w].

        Args:
            seqlens: int32 [p], the features of each image.
            max_seqlen: the largest of them.
        """
        context, _ = self.modality_projection(features)
        num_images, num_latents = len(seqlens), len(self.latents)
        reading = LatentReads.of(seqlens, len(features), num_latents, max_seqlen)
        latents = self.latents.expand(num_images, -1, -1).flatten(0, 1)
        return self.norm(self.layers(latents, context, reading)).unflatten(0, (num_images, num_latents))


class PerceiverLayers(MegatronModule):
    """The layers by their numbers: megatron-core's checkpoints keep no shards of what is in torch's ModuleList."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        for index in range(config.num_layers):
            self.add_module(str(index), PerceiverLayer(config, index + 1))

    def forward(self, latents: Tensor, context: Tensor, reading: LatentReads) -> Tensor:
        """Return the latents [p * l, h] after all layers."""
        for layer in self.children():
            latents = layer(latents, context, reading)
        return latents


class PerceiverLayer(MegatronModule):
    """Latents attend to the context and themselves, then go through an MLP.

    megatron-core's CrossAttention (0.19.2) has no groups of query heads.
    """

    def __init__(self, config: TransformerConfig, layer_number: int) -> None:
        super().__init__(config=config)
        width, size = config.hidden_size, config.kv_channels
        assert size is not None and config.num_query_groups is not None
        if config.num_query_groups % config.tensor_model_parallel_size:
            raise ConversionError(
                f"perceiver_config.num_key_value_heads = {config.num_query_groups} is not a multiple of "
                f"tensor_model_parallel_size {config.tensor_model_parallel_size}; choose a layout that divides it"
            )
        self.input_latents_norm, self.input_context_norm = _norm(config), _norm(config)
        self.linear_q = column_linear(config, width, config.num_attention_heads * size)
        self.linear_k = column_linear(config, width, config.num_query_groups * size)
        self.linear_v = column_linear(config, width, config.num_query_groups * size)
        is_local = config.transformer_impl == "local"
        attention: type[nn.Module] = SDPAttention if is_local else TEDotProductAttention
        self.core_attention = attention(config, layer_number, AttnMaskType.no_mask, "cross")
        self.linear_proj = row_linear(config, config.num_attention_heads * size, width)
        self.post_attention_layernorm = _norm(config)
        self.mlp = _gated_mlp(config, width)

    def forward(self, latents: Tensor, context: Tensor, reading: LatentReads) -> Tensor:
        """Return the latents [p * l, h] after reading the context [n, h]."""
        normed = self.input_latents_norm(latents)
        read = torch.cat([self.input_context_norm(context), normed])[reading.order]
        inputs = ((self.linear_q, normed), (self.linear_k, read), (self.linear_v, read))
        heads = [linear(x)[0].unflatten(-1, (-1, self.config.kv_channels)) for linear, x in inputs]  # [t, heads, d]
        attended = self.core_attention(*heads, None, AttnMaskType.no_mask, packed_seq_params=reading.lengths)
        latents = latents + self.linear_proj(attended.flatten(1))[0]
        return latents + self.mlp(self.post_attention_layernorm(latents))[0]


def _norm(config: TransformerConfig) -> nn.Module:
    norm: nn.Module = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
    return norm


def _gated_mlp(config: TransformerConfig, input_size: int) -> MLP:
    layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MLP(config, layers, input_size=input_size)
