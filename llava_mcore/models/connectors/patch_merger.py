"""Qwen-VL's connector: squares of neighboring patches are normalized, concatenated, and go through an MLP.

The patches of a square follow each other, so that concatenating them moves nothing. Qwen3-VL has one more such
MLP for each inner layer of the tower whose features are added in the language model (DeepStack).

n: patches, m: patches of a square, w: the tower's width, h: language hidden size, k: inner layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.models.connectors.connector import Connector, Output
from llava_mcore.models.norms import TorchNorm
from llava_mcore.models.vision.families.registry import qwen_tower
from llava_mcore.weights.table import COLUMN, REPLICATED, ROW, Entry

_WEIGHT_BIAS = ("weight", "bias")


@dataclass(frozen=True)
class MergerNames:
    """Hugging Face's names of a merger's norm and its two linear layers, relative to it."""

    norm: str
    linear_1: str
    linear_2: str


class PatchMerger(Connector):
    """`merger`, and for Qwen3-VL `deepstack_merger_list`.

    Args:
        names: of the modules in a merger.
        normalization: of the norm.
        out_size_key: of vision_config, where the width of its features is.
        num_inner: inner layers of the tower, whose features come before those of the last.
    """

    def __init__(self, names: MergerNames, normalization: str, *, out_size_key: str, num_inner: int = 0) -> None:
        self.names, self.normalization, self.num_inner = names, normalization, num_inner
        self.out_size_key = out_size_key

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for features of another width."""
        width, out_size = hf.text_config.hidden_size, hf.vision_config.to_dict()[self.out_size_key]
        if width != out_size:
            raise ConversionError(
                f"vision_config.{self.out_size_key} = {out_size} and text_config.hidden_size = {width} must be equal"
            )
        tower = qwen_tower(hf.vision_config)
        return {
            "num_layers": 1,
            "hidden_size": width,
            "ffn_hidden_size": tower.hidden_size(hf.vision_config) * tower.merged(hf.vision_config),
            "activation_func": F.gelu,
            "add_bias_linear": True,
            "normalization": self.normalization,
            "layernorm_epsilon": 1e-6,  # the class has no setting for it
            "hidden_dropout": 0.0,
        }

    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the mergers. `input_size`: w * (1 + k)."""
        width = input_size // (1 + self.num_inner)
        return PatchMergers(config, width, qwen_tower(hf.vision_config).merged(hf.vision_config), self.num_inner)

    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return the number of features: one for each square of patches."""
        return num_features // qwen_tower(hf.vision_config).merged(hf.vision_config)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return the entries of all mergers."""
        entries = self._merger(megatron, prefix + "merger.")
        for i in range(self.num_inner):
            entries += self._merger(f"{megatron}deepstack_{i}.", f"{prefix}deepstack_merger_list.{i}.")
        return entries

    def _merger(self, megatron: str, prefix: str) -> list[Entry]:
        m, names = megatron + "encoder.", self.names
        of_norm = _WEIGHT_BIAS if self.normalization == "LayerNorm" else _WEIGHT_BIAS[:1]
        return [
            *Entry(megatron + "norm.{wb}", f"{prefix}{names.norm}.{{wb}}", REPLICATED).expand(wb=of_norm),
            Entry(m + "linear_fc1.weight", f"{prefix}{names.linear_1}.weight", COLUMN),
            Entry(m + "linear_fc1.bias", f"{prefix}{names.linear_1}.bias", COLUMN),
            Entry(m + "linear_fc2.weight", f"{prefix}{names.linear_2}.weight", ROW),
            Entry(m + "linear_fc2.bias", f"{prefix}{names.linear_2}.bias", REPLICATED),
        ]

    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of the linear layers of all mergers, the first ones first."""
        tower, mergers = qwen_tower(hf.vision_config), 1 + self.num_inner
        wide = tower.hidden_size(hf.vision_config) * tower.merged(hf.vision_config)
        rows = self.num_features(hf, num_features)
        return [2 * mergers * rows * wide * wide, 2 * mergers * rows * wide * hf.text_config.hidden_size]

    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return the modules of every merger."""
        outputs = self._outputs(module, "merger.")
        for i in range(self.num_inner):
            outputs |= self._outputs(module.get_submodule(f"deepstack_{i}"), f"deepstack_merger_list.{i}.")
        return outputs

    def _outputs(self, merger: nn.Module, prefix: str) -> dict[str, Output]:
        names = self.names
        return {
            prefix + names.norm: Output(merger.get_submodule("norm"), divided=False),
            prefix + names.linear_1: Output(merger.get_submodule("encoder.linear_fc1"), divided=True),
            prefix + names.linear_2: Output(merger.get_submodule("encoder.linear_fc2"), divided=False),
        }


class Merger(MultimodalProjector):
    """megatron-core's MLP on squares of patches, after a norm of the patches or of the squares."""

    def __init__(self, config: TransformerConfig, width: int, merged: int, *, norm_of_squares: bool) -> None:
        """width: w. merged: m."""
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, layers, projector_type="mlp", input_size=width * merged)
        self.merged, self.norm_of_squares = merged, norm_of_squares
        size = width * merged if norm_of_squares else width
        self.norm: nn.Module = TorchNorm(config, size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return [n / m, h] of patches [n, w]."""
        n, w = hidden_states.shape
        squares = (n // self.merged, self.merged * w)
        x = self.norm(hidden_states.reshape(squares) if self.norm_of_squares else hidden_states)
        return super().forward(x.reshape(squares))


class PatchMergers(Merger):
    """The merger of the tower's last layer, with those of its inner layers as children."""

    def __init__(self, config: TransformerConfig, width: int, merged: int, num_inner: int) -> None:
        """width: w. merged: m. num_inner: k."""
        super().__init__(config, width, merged, norm_of_squares=False)
        self.num_inner = num_inner
        for i in range(num_inner):  # not a ModuleList: megatron-core's checkpoints keep no shards of its children
            self.add_module(f"deepstack_{i}", Merger(config, width, merged, norm_of_squares=True))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return [n / m, h * (1 + k)] of patches [n, w * (1 + k)]: the last layer's features first.

        The last layer of the tower comes last in the input, as it is the highest.
        """
        *inner, last = hidden_states.chunk(1 + self.num_inner, dim=-1)
        merged = [super().forward(last)]
        merged += [self.get_submodule(f"deepstack_{i}")(x) for i, x in enumerate(inner)]
        return torch.cat(merged, dim=-1) if inner else merged[0]
