"""What the code asks of a connector: one file beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers import PretrainedConfig

from llava_mcore.mapping.table import Entry


@dataclass(frozen=True)
class Output:
    """A module of which `check` compares the output. `divided`: over the tensor-parallel ranks, by its features."""

    module: nn.Module
    divided: bool


class Connector(ABC):
    """What makes the language model's features of the tower's.

    n: features of a tile before it, m: behind it, w: the tower's width (all feature layers), h: language hidden size.
    """

    @abstractmethod
    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields; its hidden size is the language model's."""

    @abstractmethod
    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the module: [tiles, n, w] -> [tiles, m, h]. `input_size`: w."""

    @abstractmethod
    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return m of n."""

    @abstractmethod
    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return its entries. `megatron`, `prefix`: of the module, on the Megatron and on the Hugging Face side."""

    @abstractmethod
    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of its matrix products with weights for one tile, in the order of the forward pass.

        Args:
            input_size: w.
            num_features: n.
        """

    @abstractmethod
    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return its modules by their names in Hugging Face's, relative to it. `module`: what `build` returned."""
