"""Gemma 3's text model: Gemma 2 with norms on query and key heads instead of capped scores.

Layers with a window have their own rotary frequencies, without the scaling of the others.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from llava_mcore.models.language.families.dense import expand_layers, head_norm_entries
from llava_mcore.models.language.families.gemma2 import LAYER_NAMES, Gemma2
from llava_mcore.models.language.shape import DecoderShape, Rope, require_fixed_rope
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import Entry


class Gemma3(Gemma2):
    """Gemma 3's text model."""

    model_types = ("gemma3_text",)

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return super().config_from_hf(hf) | {"qk_layernorm": True}

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have. transformers does not read attn_logit_softcapping
        here."""
        kinds = sorted(set(hf.layer_types))
        for kind in kinds:
            require_fixed_rope(hf.rope_parameters[kind], f"text_config.rope_parameters.{kind}")
        with torch.device("cpu"):
            embedding = Gemma3RotaryEmbedding(hf)
        buffers, scalings = dict(embedding.named_buffers()), vars(embedding)
        ropes = {k: Rope(buffers[f"{k}_inv_freq"].clone(), scalings[f"{k}_attention_scaling"]) for k in kinds}
        local = ropes.get("sliding_attention")
        shared = ropes.get("full_attention", local)
        assert shared is not None
        scale = hf.hidden_size**0.5
        return DecoderShape(shared, local_rope=local, embedding_scale=scale, post_norms=True, names=LAYER_NAMES)

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        return super().weight_entries(hf, names) + expand_layers(head_norm_entries(names), hf)
