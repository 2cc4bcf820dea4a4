"""Qwen2 and Qwen2.5: Llama's decoder with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.dense import expand_layers, layer_entries, transformer_fields
from llava_mcore.models.language.shape import DecoderShape, rope_from_hf
from llava_mcore.weights.layouts import FuseQKV
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import COLUMN, Entry


class Qwen2(LanguageFamily):
    """Qwen2 and Qwen2.5."""

    model_types = ("qwen2",)

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return transformer_fields(hf) | {"add_qkv_bias": True}

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have."""
        return DecoderShape(rope_from_hf(hf))

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        bias = Entry(
            names.megatron_layer + "self_attention.linear_qkv.bias",
            tuple(names.hf_layer + f"self_attn.{x}_proj.bias" for x in "qkv"),
            COLUMN,
            FuseQKV(hf.num_attention_heads, hf.num_key_value_heads),
        )
        return layer_entries(hf, names) + expand_layers([bias], hf)
