"""Gemma 2: norms also after attention and MLP, GeGLU, scaled embeddings, capped scores, windows in every other layer.

LLaVA in transformers computes logits without Gemma's final_logit_softcapping, which belongs to Gemma2ForCausalLM; so
does this model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from transformers import PretrainedConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding

from llava_mcore.errors import ConversionError
from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.dense import expand_layers, projection_entries, transformer_fields
from llava_mcore.models.language.shape import USUAL_NAMES, DecoderShape, rope_from_hf
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import REPLICATED, Entry

LAYER_NAMES = replace(
    USUAL_NAMES,
    norm_between="pre_feedforward_layernorm",
    norm_after_attention="post_attention_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
)
_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj.post_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp.linear_fc2.post_layernorm": "post_feedforward_layernorm",
}


class Gemma2(LanguageFamily):
    """Gemma 2."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma2",)
    computes_windows = True

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: attention to later tokens (EmbeddingGemma), or an unknown kind of layer.
        """
        if hf.use_bidirectional_attention:
            raise ConversionError("text_config.use_bidirectional_attention = true: only causal decoders are supported")
        known = {"sliding_attention", "full_attention"}
        if set(hf.layer_types) - known:
            unknown = ", ".join(sorted(set(hf.layer_types) - known))
            raise ConversionError(f"text_config.layer_types: {unknown}; known: {', '.join(sorted(known))}")
        windows = [kind == "sliding_attention" and hf.sliding_window is not None for kind in hf.layer_types]
        return transformer_fields(hf, activation_key="hidden_activation") | {
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": hf.query_pre_attn_scalar**-0.5,
            "window_size": (hf.sliding_window - 1, 0) if any(windows) else None,
            "window_attn_skip_freq": [int(x) for x in windows],
        }

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have."""
        return DecoderShape(
            rope_from_hf(hf, Gemma2RotaryEmbedding),
            embedding_scale=hf.hidden_size**0.5,
            attention_softcap=hf.attn_logit_softcapping,
            post_norms=True,
            names=LAYER_NAMES,
        )

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        m, h = names.megatron_layer, names.hf_layer
        norms = [
            Entry(f"{m}{megatron_name}.weight", f"{h}{hf_name}.weight", REPLICATED)
            for megatron_name, hf_name in _NORMS.items()
        ]
        return expand_layers([*norms, *projection_entries(hf, names)], hf)
