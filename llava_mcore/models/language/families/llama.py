"""Llama and everything with its architecture: Llama 2 and 3, Vicuna, llm-jp, SmolLM2.

Mistral too; a rule of the configuration requires that its sliding window is not shorter than a sequence.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.dense import layer_entries, transformer_fields
from llava_mcore.models.language.shape import DecoderShape, rope_from_hf
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import Entry


class Llama(LanguageFamily):
    """Llama, and models with its architecture."""

    model_types = ("llama", "mistral")

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return transformer_fields(hf)

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have."""
        return DecoderShape(rope_from_hf(hf))

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        return layer_entries(hf, names)
