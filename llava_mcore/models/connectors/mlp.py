"""LLaVA-1.5's projector: two linear layers with an activation between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers import PretrainedConfig

from llava_mcore.models.activations import activation
from llava_mcore.models.connectors.connector import Connector, Output
from llava_mcore.weights.table import COLUMN, REPLICATED, ROW, Entry


class Mlp(Connector):
    """`linear_1`, activation, `linear_2`; both as wide as the language model."""

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields; its hidden size is the language model's."""
        width = hf.text_config.hidden_size
        return {
            "num_layers": 1,
            "hidden_size": width,
            "ffn_hidden_size": width,
            "activation_func": activation(hf.projector_hidden_act, where="projector_hidden_act"),
            "add_bias_linear": hf.multimodal_projector_bias,
            "hidden_dropout": 0.0,
        }

    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> MultimodalProjector:
        """Build the projector for features of width `input_size`."""
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return MultimodalProjector(config, layers, projector_type="mlp", input_size=input_size)

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return n: the number does not change."""
        return num_features

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entries of both layers."""
        m, h = megatron + "encoder.", prefix
        entries = [
            Entry(m + "linear_fc1.weight", h + "linear_1.weight", COLUMN),
            Entry(m + "linear_fc2.weight", h + "linear_2.weight", ROW),
        ]
        if hf.multimodal_projector_bias:
            entries.append(Entry(m + "linear_fc1.bias", h + "linear_1.bias", COLUMN))
            entries.append(Entry(m + "linear_fc2.bias", h + "linear_2.bias", REPLICATED))
        return entries

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of both layers for one tile."""
        width = hf.text_config.hidden_size
        return [2 * num_features * input_size * width, 2 * num_features * width * width]

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return both layers."""
        layers = module.get_submodule("encoder")
        return {
            "linear_1": Output(layers.get_submodule("linear_fc1"), divided=True),
            "linear_2": Output(layers.get_submodule("linear_fc2"), divided=False),
        }
