"""The projector of Qwen2-Audio and Mllama: one linear layer with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.models.connectors.connector import Connector, Output
from llava_mcore.weights.table import COLUMN, Entry


class LinearConnector(Connector):
    """A layer as wide as the language model. `name`: in files."""

    def __init__(self, name: str = "linear") -> None:
        self.name = name

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields; its hidden size is the language model's."""
        width = hf.text_config.hidden_size
        return {"num_layers": 1, "hidden_size": width, "ffn_hidden_size": width, "hidden_dropout": 0.0}

    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the projector for features of width `input_size`."""
        return LinearProjection(config, input_size)

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return n: the number does not change."""
        return num_features

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entries of weight and bias."""
        return list(
            Entry(megatron + "encoder.{wb}", f"{prefix}{self.name}.{{wb}}", COLUMN).expand(wb=("weight", "bias"))
        )

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of the matrix."""
        return [2 * num_features * input_size * hf.text_config.hidden_size]

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return the linear layer, whose whole output is on every rank."""
        return {self.name: Output(module.get_submodule("encoder"), divided=False)}


class LinearProjection(MegatronModule):
    """Divided by outputs, which are gathered. megatron-core's projector gathers them without their biases."""

    def __init__(self, config: TransformerConfig, input_size: int) -> None:
        super().__init__(config=config)
        assert config.init_method is not None
        self.encoder = ColumnParallelLinear(
            input_size, config.hidden_size, config=config, init_method=config.init_method, gather_output=True
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return [m, h] of features [m, w]."""
        return self.encoder(features)[0]
