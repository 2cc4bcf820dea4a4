"""Idefics2's connector: a gated MLP to the language model's width, then latents that read a picture's features.

A picture becomes as many features as there are latents, whatever its size (perceiver resampler, Alayrac et al. 2022,
arXiv 2204.14198). The features of all pictures are packed; attention keeps pictures apart by their lengths.

p: pictures, n: features of all pictures, l: latents of a picture, w: the tower's width, h: the language model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import MEDIA_SEQLENS
from llava_mcore.models.activations import activation
from llava_mcore.models.attention import SDPAttention
from llava_mcore.models.connectors.connector import Connector, Output
from llava_mcore.models.norms import TorchNorm
from llava_mcore.weights.layouts import Concat
from llava_mcore.weights.sharding import COLUMN, GATED_COLUMN, REPLICATED, ROW
from llava_mcore.weights.table import Entry

_GATED_WIDTH = 4
"""Width of the MLPs after the latents' attention, in hidden sizes: Idefics2PerceiverLayer has no setting for it."""
_NORMS = ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
_LINEARS = {"linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj"}


class Perceiver(Connector):
    """`modality_projection`, then `perceiver_resampler`, without biases."""

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields of the resampler; its hidden size is the language model's.

        Raises:
            ConversionError: the perceiver has another width, its key/value heads do not divide its heads, or the
                language model's config has no `hidden_act`.
        """
        perceiver, width = hf.perceiver_config, hf.text_config.hidden_size
        heads, groups = perceiver.resampler_n_heads, perceiver.num_key_value_heads
        if perceiver.hidden_size != width or heads % groups:
            raise ConversionError(
                f"perceiver_config: hidden_size {perceiver.hidden_size} must be the language model's {width}, and "
                f"resampler_n_heads {heads} a multiple of num_key_value_heads {groups}"
            )
        if "hidden_act" not in hf.text_config.to_dict():
            raise ConversionError(
                f"text_config has no hidden_act, from which transformers' Idefics2 takes its connector's activation: "
                f"{hf.text_config.model_type} cannot be its language model; take Mistral, Llama or Qwen, for example"
            )
        return {
            "num_layers": perceiver.resampler_depth,
            "hidden_size": width,
            "ffn_hidden_size": _GATED_WIDTH * width,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": perceiver.resampler_head_dim,
            "activation_func": activation(perceiver.hidden_act, where="perceiver_config.hidden_act"),
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "layernorm_epsilon": perceiver.rms_norm_eps,
            "attention_dropout": perceiver.attention_dropout,
            "hidden_dropout": 0.0,
        }

    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the connector for features of width `input_size`."""
        text = hf.text_config
        projection = replace(
            config,
            ffn_hidden_size=text.intermediate_size,
            activation_func=activation(text.hidden_act, where="text_config.hidden_act"),
        )
        num_latents = hf.perceiver_config.resampler_n_latents
        return PerceiverResampler(config, projection, input_size=input_size, num_latents=num_latents)

    def run(self, module: nn.Module, features: Tensor, media: Mapping[str, Tensor], max_seqlen: int) -> Tensor:
        """Return the features [p, l, h] of pictures whose lengths are MEDIA_SEQLENS."""
        result: Tensor = module(features, media[MEDIA_SEQLENS], max_seqlen)
        return result

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return the number of latents."""
        return int(hf.perceiver_config.resampler_n_latents)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entries of the MLP, the latents and their layers."""
        resampler = prefix + "perceiver_resampler."
        m, h = megatron + "layers.{layer}.", resampler + "layers.{layer}."
        layer = [
            *(Entry(f"{m}{name}.weight", f"{h}{name}.weight", REPLICATED) for name in _NORMS),
            *(
                Entry(f"{m}{megatron_name}.weight", f"{h}self_attn.{name}.weight", COLUMN)
                for megatron_name, name in _LINEARS.items()
            ),
            Entry(m + "linear_proj.weight", h + "self_attn.o_proj.weight", ROW),
            *_gated_entries(m + "mlp.", h + "mlp."),
        ]
        layers = range(hf.perceiver_config.resampler_depth)
        return [
            *_gated_entries(megatron + "modality_projection.", prefix + "modality_projection."),
            Entry(megatron + "latents", resampler + "latents", REPLICATED),
            *(x for entry in layer for x in entry.expand(layer=layers)),
            Entry(megatron + "norm.weight", resampler + "norm.weight", REPLICATED),
        ]

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int, num_pictures: int = 1) -> list[int]:
        """Return the FLOPs of all matrices; products of scores, which have no weights, are `attention`.

        Args:
            input_size: w.
            num_features: n.
            num_pictures: p.
        """
        text, perceiver = hf.text_config, hf.perceiver_config
        width, inner = text.hidden_size, text.intermediate_size
        latents = num_pictures * perceiver.resampler_n_latents
        queries = perceiver.resampler_n_heads * perceiver.resampler_head_dim
        keys = perceiver.num_key_value_heads * perceiver.resampler_head_dim
        layer = [
            2 * latents * width * queries,
            2 * 2 * (num_features + latents) * width * keys,
            2 * latents * queries * width,
            3 * 2 * latents * width * _GATED_WIDTH * width,
        ]
        projection = [2 * 2 * num_features * input_size * inner, 2 * num_features * inner * width]
        return projection + perceiver.resampler_depth * layer

    def attention(self, hf: PretrainedConfig, *, num_features: int, num_pictures: int) -> int:
        """Return the FLOPs of scores and of the sums by them: the latents of a picture see its features and
        themselves."""
        perceiver = hf.perceiver_config
        latents = perceiver.resampler_n_latents
        num_pairs = latents * (num_features + num_pictures * latents)
        return int(
            4 * num_pairs * perceiver.resampler_depth * perceiver.resampler_n_heads * perceiver.resampler_head_dim
        )

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return the modules that exist in both models: not gate and value of MLPs, which are fused here."""
        resampler = "perceiver_resampler."
        pairs = {"modality_projection.down_proj": ("modality_projection.linear_fc2", False)}
        for i, _ in enumerate(module.get_submodule("layers").children()):
            megatron_prefix, hf_prefix = f"layers.{i}.", f"{resampler}layers.{i}."
            pairs |= {hf_prefix + name: (megatron_prefix + name, False) for name in _NORMS}
            pairs |= {
                f"{hf_prefix}self_attn.{name}": (megatron_prefix + linear, True) for linear, name in _LINEARS.items()
            }
            pairs[hf_prefix + "self_attn.o_proj"] = (megatron_prefix + "linear_proj", False)
            pairs[hf_prefix + "mlp.down_proj"] = (megatron_prefix + "mlp.linear_fc2", False)
        pairs[resampler + "norm"] = ("norm", False)
        return {
            name: Output(module.get_submodule(megatron_name), divided)
            for name, (megatron_name, divided) in pairs.items()
        }


@dataclass(frozen=True)
class LatentReads:
    """The order in which the latents read: the features of the first picture, its latents, those of the second, …

    `order`: int64 [n + p * l], indices into all features followed by all latents. `lengths`: where pictures begin,
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
        pictures = torch.arange(len(seqlens), device=seqlens.device)
        owner = pictures.repeat_interleave(seqlens, output_size=num_features)  # of each feature
        after = seqlens.cumsum(0)[:, None] + torch.arange(num_latents, device=seqlens.device)
        targets = torch.cat(
            [
                torch.arange(num_features, device=seqlens.device) + num_latents * owner,
                (after + num_latents * pictures[:, None]).flatten(),
            ]
        )
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
            seqlens: int32 [p], the features of each picture.
            max_seqlen: the largest of them.
        """
        context, _ = self.modality_projection(features)
        num_pictures, num_latents = len(seqlens), len(self.latents)
        reading = LatentReads.of(seqlens, len(features), num_latents, max_seqlen)
        latents = self.latents.expand(num_pictures, -1, -1).flatten(0, 1)
        return self.norm(self.layers(latents, context, reading)).unflatten(0, (num_pictures, num_latents))


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
        self.linear_q = _column(config, width, config.num_attention_heads * size)
        self.linear_k = _column(config, width, config.num_query_groups * size)
        self.linear_v = _column(config, width, config.num_query_groups * size)
        is_local = config.transformer_impl == "local"
        attention: type[nn.Module] = SDPAttention if is_local else TEDotProductAttention
        self.core_attention = attention(config, layer_number, AttnMaskType.no_mask, "cross")
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * size,
            width,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
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


def _column(config: TransformerConfig, inputs: int, outputs: int) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        inputs, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False
    )


def _gated_mlp(config: TransformerConfig, input_size: int) -> MLP:
    layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MLP(config, layers, input_size=input_size)


def _gated_entries(megatron: str, hf: str) -> list[Entry]:
    gate_and_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return [
        Entry(megatron + "linear_fc1.weight", gate_and_up, GATED_COLUMN, Concat(2)),
        Entry(megatron + "linear_fc2.weight", hf + "down_proj.weight", ROW),
    ]
