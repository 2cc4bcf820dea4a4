"""Qwen3 (dense): Llama's decoder with an RMSNorm on every query and key head and an explicit head size."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.conversion.mapping import Entry
from llava_mcore.conversion.sharding import REPLICATED
from llava_mcore.models.language.dense import expand_layers, layer_entries, transformer_fields
from llava_mcore.models.names import TextNames


def config_from_hf(hf: PretrainedConfig) -> dict[str, Any]:
    """Return megatron-core TransformerConfig fields."""
    return transformer_fields(hf) | {"qk_layernorm": True}


def weight_entries(hf: PretrainedConfig, names: TextNames) -> list[Entry]:
    """Return the entries of all layers."""
    norms = [
        Entry(
            names.megatron_layer + f"self_attention.{x}_layernorm.weight",
            names.hf_layer + f"self_attn.{x}_norm.weight",
            REPLICATED,
        )
        for x in "qk"
    ]
    return layer_entries(hf, names) + expand_layers(norms, hf)
