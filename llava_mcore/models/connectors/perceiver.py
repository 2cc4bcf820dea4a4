"""Idefics2's connector: a gated MLP to the language model's width, then latents that read a tile's features.

The number of outputs is the number of latents, whatever the number of features (perceiver resampler, Alayrac et al.
2022,
arXiv 2204.14198). No class of the registry uses it yet: Idefics2's processor returns pictures of any shape with a
mask, which towers with a fixed tile size do not support.

t: tiles, n: features of one, l: latents, w: the tower's width, h: the language model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.mapping.layouts import Concat
from llava_mcore.mapping.sharding import COLUMN, GATED_COLUMN, REPLICATED, ROW
from llava_mcore.mapping.table import Entry
from llava_mcore.models.activations import activation
from llava_mcore.models.attention import SDPAttention
from llava_mcore.models.connectors.connector import Connector, Output

_GATED_WIDTH = 4
"""Width of the MLPs after the latents' attention, in hidden sizes: Idefics2PerceiverLayer has no setting for it."""
_NORMS = ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
_LINEARS = {"linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj"}


class Perceiver(Connector):
    """`modality_projection`, then `perceiver_resampler`, without biases."""

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields of the resampler; its hidden size is the language model's.

        Raises:
            ConversionError: the perceiver has another width, or its key/value heads do not divide its heads.
        """
        perceiver, width = hf.perceiver_config, hf.text_config.hidden_size
        heads, groups = perceiver.resampler_n_heads, perceiver.num_key_value_heads
        if perceiver.hidden_size != width or heads % groups:
            raise ConversionError(
                f"perceiver_config: hidden_size {perceiver.hidden_size} must be the language model's {width}, and "
                f"resampler_n_heads {heads} a multiple of num_key_value_heads {groups}"
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

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return the number of latents."""
        return int(hf.perceiver_config.resampler_n_latents)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entries of the MLP, the latents and their layers."""
        resampler = prefix + "perceiver_resampler."
        m, h = megatron + "layers.{layer}.", resampler + "layers.{layer}."
        layer = [
            *(Entry(f"{m}{name}.weight", f"{h}{name}.weight", REPLICATED) for name in _NORMS),
            *(Entry(f"{m}{ours}.weight", f"{h}self_attn.{name}.weight", COLUMN) for ours, name in _LINEARS.items()),
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

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of all matrices for one tile; products of scores, which have no weights, are excluded."""
        text, perceiver = hf.text_config, hf.perceiver_config
        width, inner, latents = text.hidden_size, text.intermediate_size, perceiver.resampler_n_latents
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

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return the modules that exist in both models: not gate and value of MLPs, which are fused here."""
        resampler = "perceiver_resampler."
        found = {"modality_projection.down_proj": ("modality_projection.linear_fc2", False)}
        for i, _ in enumerate(module.get_submodule("layers").children()):
            ours, theirs = f"layers.{i}.", f"{resampler}layers.{i}."
            found |= {theirs + name: (ours + name, False) for name in _NORMS}
            found |= {f"{theirs}self_attn.{name}": (ours + linear, True) for linear, name in _LINEARS.items()}
            found[theirs + "self_attn.o_proj"] = (ours + "linear_proj", False)
            found[theirs + "mlp.down_proj"] = (ours + "mlp.linear_fc2", False)
        found[resampler + "norm"] = ("norm", False)
        return {name: Output(module.get_submodule(ours), divided) for name, (ours, divided) in found.items()}


class PerceiverResampler(MegatronModule):
    """The whole connector; latents and norms are the same on every tensor-parallel rank."""

    def __init__(
        self, config: TransformerConfig, projection: TransformerConfig, *, input_size: int, num_latents: int
    ) -> None:
        """config: of the latents' layers. projection: config of the MLP before them, which reads input_size values."""
        super().__init__(config=config)
        self.modality_projection = _gated_mlp(projection, input_size)
        self.latents = nn.Parameter(torch.ones(num_latents, config.hidden_size, dtype=config.params_dtype))
        self.layers = nn.ModuleList(PerceiverLayer(config) for _ in range(config.num_layers))
        self.norm = _norm(config)

    def forward(self, features: Tensor) -> Tensor:
        """Return [t, l, h] of features [t, n, w]."""
        context, _ = self.modality_projection(features)
        latents = self.latents.expand(features.shape[0], -1, -1)
        for layer in self.layers:
            latents = layer(latents, context)
        return self.norm(latents)


class PerceiverLayer(MegatronModule):
    """Latents attend to the context and themselves, then go through an MLP.

    megatron-core's CrossAttention (0.19.2) has no groups of query heads.
    """

    def __init__(self, config: TransformerConfig) -> None:
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
        self.core_attention = SDPAttention(config, 1, AttnMaskType.no_mask, "cross")
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

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        """Return the latents [t, l, h] after reading the context [t, n, h]."""
        normed = self.input_latents_norm(latents)
        read = torch.cat([self.input_context_norm(context), normed], dim=1)
        inputs = ((self.linear_q, normed), (self.linear_k, read), (self.linear_v, read))
        heads = [linear(x)[0].unflatten(-1, (-1, self.config.kv_channels)).transpose(0, 1) for linear, x in inputs]
        found = self.core_attention(*heads).transpose(0, 1)
        latents = latents + self.linear_proj(found)[0]
        return latents + self.mlp(self.post_attention_layernorm(latents))[0]


def _norm(config: TransformerConfig) -> nn.Module:
    return WrappedTorchNorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


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
