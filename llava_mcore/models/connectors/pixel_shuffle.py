"""InternVL's projector: a square of features becomes one wide feature, which passes through a norm and an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.models.activations import activation
from llava_mcore.models.connectors.connector import Connector, Output
from llava_mcore.models.vision.features import image_side, num_patches, patch_side
from llava_mcore.weights.table import COLUMN, REPLICATED, ROW, Entry

_WEIGHT_BIAS = ("weight", "bias")


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Concatenate the features of neighboring squares.

    The features of a square are in row order, as in InternVL and Idefics3 in transformers.

    Args:
        x: [tiles, n, c], row by row of a square grid whose side is a multiple of factor.

    Returns:
        [tiles, n / factor², c * factor²].
    """
    side, width = isqrt(x.shape[1]), x.shape[2]
    small = side // factor
    by_square = x.view(-1, small, factor, small, factor, width)  # rows, in a square, columns, in a square
    return by_square.transpose(2, 3).reshape(-1, small * small, factor * factor * width)


def num_shuffled(num_features: int, factor: int) -> int:
    """Return the features of a tile after the shuffle. Raises ConversionError for a grid that it cannot divide."""
    side = isqrt(num_features)
    if side * side != num_features or side % factor:
        raise ConversionError(
            f"{num_features} features of an image do not form a square grid whose side is a multiple of {factor}: "
            f"the connector turns each {factor} x {factor} features into one; use a tower or images of another size"
        )
    return num_features // factor**2


def check_grid(vision: PretrainedConfig, factor: int, *, key: str) -> None:
    """Raise ConversionError for a tower whose grid of patches the shuffle cannot divide. `key`: the key of `factor`."""
    side = isqrt(num_patches(vision))
    if side % factor:
        raise ConversionError(
            f"{key}: the tower's grid is {side} x {side} patches (vision_config.image_size {image_side(vision)}, "
            f"patch_size {patch_side(vision)}), and the connector turns each {factor} x {factor} into one feature: "
            f"{side} must be a multiple of {factor}"
        )


class PixelShuffle(Connector):
    """`layer_norm`, `linear_1`, activation, `linear_2` on shuffled features."""

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields; its hidden size is the language model's.

        Raises:
            ConversionError: downsample_ratio is not 1 divided by an integer, or does not divide the grid.
        """
        check_grid(hf.vision_config, _factor(hf), key=f"downsample_ratio = {hf.downsample_ratio}")
        width = hf.text_config.hidden_size
        return {
            "num_layers": 1,
            "hidden_size": width,
            "ffn_hidden_size": width,
            "activation_func": activation(hf.projector_hidden_act, where="projector_hidden_act"),
            "add_bias_linear": True,
            "normalization": "LayerNorm",
            "layernorm_epsilon": nn.LayerNorm(1).eps,  # torch's: the class has no setting for it
            "hidden_dropout": 0.0,
        }

    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the projector for features of width `input_size`."""
        return ShuffleProjector(config, input_size, _factor(hf))

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return the number of features: one for each square of downsample_ratio's size."""
        return num_shuffled(num_features, _factor(hf))

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entries of the norm and both layers."""
        m = megatron + "encoder."
        norm = Entry(megatron + "layer_norm.{wb}", prefix + "layer_norm.{wb}", REPLICATED)
        return [
            *norm.expand(wb=_WEIGHT_BIAS),
            Entry(m + "linear_fc1.weight", prefix + "linear_1.weight", COLUMN),
            Entry(m + "linear_fc1.bias", prefix + "linear_1.bias", COLUMN),
            Entry(m + "linear_fc2.weight", prefix + "linear_2.weight", ROW),
            Entry(m + "linear_fc2.bias", prefix + "linear_2.bias", REPLICATED),
        ]

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of both layers for one tile; the first reads as many values as before the shuffle."""
        width = hf.text_config.hidden_size
        return [2 * num_features * input_size * width, 2 * self.num_features(hf, num_features) * width * width]

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return the norm and both layers."""
        return {
            "layer_norm": Output(module.get_submodule("layer_norm"), divided=False),
            "linear_1": Output(module.get_submodule("encoder.linear_fc1"), divided=True),
            "linear_2": Output(module.get_submodule("encoder.linear_fc2"), divided=False),
        }


class ShuffleProjector(MultimodalProjector):
    """megatron-core's MLP after the shuffle and a norm, which is replicated on the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, input_size: int, factor: int) -> None:
        """input_size: width of a feature before the shuffle."""
        width = input_size * factor**2
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, layers, projector_type="mlp", input_size=width)
        self.factor = factor
        self.layer_norm = WrappedTorchNorm(config=config, hidden_size=width, eps=config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return [tiles, n / factor², h] of features [tiles, n, w]."""
        return super().forward(self.layer_norm(pixel_shuffle(hidden_states, self.factor)))


def _factor(hf: PretrainedConfig) -> int:
    """Return the side of the squares that become one feature."""
    ratio = hf.downsample_ratio
    factor = round(1 / ratio) if ratio > 0 else 0
    if factor < 1 or 1 / factor != ratio:
        raise ConversionError(
            f"downsample_ratio = {ratio} is not supported: it must be 1 divided by an integer, such as 0.5"
        )
    return factor
