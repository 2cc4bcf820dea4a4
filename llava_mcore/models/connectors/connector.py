"""The interface of a connector: one file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.weights.table import Entry


@dataclass(frozen=True)
class Output:
    """A module whose output `check` compares. `divided`: its features are divided over the tensor-parallel ranks."""

    module: nn.Module
    divided: bool


class Connector(ABC):
    """Converts the tower's features into the language model's.

    n: features of a tile before it, m: after it, w: the tower's width (all feature layers), h: language hidden size.
    """

    @abstractmethod
    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields; its hidden size is the language model's."""

    @abstractmethod
    def build(self, hf: PretrainedConfig, config: TransformerConfig, *, input_size: int) -> nn.Module:
        """Build the module: [tiles, n, w] -> [tiles, m, h]. `input_size`: w."""

    def run(self, module: nn.Module, features: Tensor, media: Mapping[str, Tensor], max_seqlen: int) -> Tensor:
        """Run the module on the tower's features.

        Args:
            module: the result of `build`.
            features: [tiles, n, w], or [n, w] of packed patches.
            media: the micro-batch's fields (see `batch_fields`).
            max_seqlen: the largest of MEDIA_SEQLENS, if it has them.
        """
        result: Tensor = module(features)
        return result

    @abstractmethod
    def num_features(self, hf: PretrainedConfig, num_features: int) -> int:
        """Return the number m of features after it for n before it."""

    @abstractmethod
    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str) -> list[Entry]:
        """Return its entries. `megatron`, `prefix`: the module's name on the Megatron and on the Hugging Face side."""

    @abstractmethod
    def products(self, hf: PretrainedConfig, *, input_size: int, num_features: int) -> list[int]:
        """Return the FLOPs of its matrix products with weights for one tile, in the order of the forward pass.

        Args:
            input_size: w.
            num_features: n.
        """

    @abstractmethod
    def outputs(self, module: nn.Module) -> Mapping[str, Output]:
        """Return its modules by their relative names in Hugging Face. `module`: the result of `build`."""
