"""Phi-3, Phi-3.5 and Phi-4: Llama's decoder; files have query, key and value as one tensor, and gate and up as another.

Rotary positions may cover a part of each head (partial_rotary_factor).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from llava_mcore.errors import ConversionError
from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.dense import expand_layers, norm_entries, output_entries, transformer_fields
from llava_mcore.models.language.shape import USUAL_NAMES, DecoderShape, rope_from_hf
from llava_mcore.weights.layouts import Regroup
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import COLUMN, GATED_COLUMN, Entry

_NAMES = replace(USUAL_NAMES, query_key_value=("self_attn.qkv_proj",), into=("mlp.gate_up_proj",))


class Phi3(LanguageFamily):
    """Phi-3, Phi-3.5 and Phi-4."""

    model_types = ("phi3",)

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: dropout on the residual or the embedding, which is not applied here.
        """
        for key in ("resid_pdrop", "embd_pdrop"):
            rate = hf.to_dict()[key]
            if rate:
                raise ConversionError(f"text_config.{key} = {rate}: dropout there is not supported; set it to 0")
        return transformer_fields(hf)

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have."""
        return DecoderShape(rope_from_hf(hf, Phi3RotaryEmbedding), names=_NAMES)

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        m, h = names.megatron_layer, names.hf_layer
        regroup = Regroup(hf.num_attention_heads, hf.num_key_value_heads)
        fused = [
            Entry(m + "self_attention.linear_qkv.weight", h + "self_attn.qkv_proj.weight", COLUMN, regroup),
            Entry(m + "mlp.linear_fc1.weight", h + "mlp.gate_up_proj.weight", GATED_COLUMN),
        ]
        return expand_layers([*norm_entries(names), *fused, *output_entries(names)], hf)
