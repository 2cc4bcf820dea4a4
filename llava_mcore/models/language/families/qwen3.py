"""Qwen3 (dense): Llama's decoder with an RMSNorm on every query and key head and an explicit head size."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.dense import (
    expand_layers,
    head_norm_entries,
    layer_entries,
    transformer_fields,
)
from llava_mcore.models.language.shape import DecoderShape, rope_from_hf
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import Entry


class Qwen3(LanguageFamily):
    """Qwen3, dense."""

    model_types = ("qwen3",)

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return transformer_fields(hf) | {"qk_layernorm": True}

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have."""
        return DecoderShape(rope_from_hf(hf))

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        return layer_entries(hf, names) + expand_layers(head_norm_entries(names), hf)
