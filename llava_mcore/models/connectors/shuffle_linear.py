"""Idefics3's and SmolVLM's connector: a square of features becomes one wide feature, which a matrix projects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.models.connectors.connector import Connector, Output
from llava_mcore.models.connectors.pixel_shuffle import check_grid, num_shuffled, pixel_shuffle
from llava_mcore.weights.table import COLUMN, Entry

_NAME = "modality_projection.proj"


class ShuffleLinear(Connector):
    """`scale_factor`² concatenated features, then one linear layer without bias."""

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for a grid that does not divide."""
        check_grid(hf.vision_config, hf.scale_factor, key=f"scale_factor = {hf.scale_factor}")
        width = hf.text_config.hidden_size
        return {
            "num_layers": 1,
            "hidden_size": width,
            "ffn_hidden_size": width,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
        }

    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the connector for features of width `input_size`."""
        return ShuffleProjection(config, input_size, hf.scale_factor)

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return the number of features: one for each square of scale_factor's size."""
        return num_shuffled(num_features, hf.scale_factor)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entry of the matrix."""
        return [Entry(megatron + "encoder.weight", f"{prefix}{_NAME}.weight", COLUMN)]

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of the matrix for one tile; it reads as many values as before the shuffle."""
        return [2 * num_features * input_size * hf.text_config.hidden_size]

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return the linear layer, whose whole output is on every rank."""
        return {_NAME: Output(module.get_submodule("encoder"), divided=False)}


class ShuffleProjection(MultimodalProjector):
    """megatron-core's linear layer, divided by outputs and gathered, after the shuffle."""

    def __init__(self, config: TransformerConfig, input_size: int, factor: int) -> None:
        """input_size: width of a feature before the shuffle."""
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, layers, projector_type="affine", input_size=input_size * factor**2)
        self.factor = factor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return [tiles, n / factor², h] of features [tiles, n, w]."""
        return super().forward(pixel_shuffle(hidden_states, self.factor))
