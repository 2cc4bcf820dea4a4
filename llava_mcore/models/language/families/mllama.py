"""Mllama's decoder: Llama's, with layers between that attend to images (Llama 3.2 Vision)."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.models.mllama.modeling_mllama import MllamaRotaryEmbedding

from llava_mcore.errors import ConversionError
from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.dense import (
    expand_layers,
    head_dim,
    mlp_entries,
    norm_entries,
    projection_entries,
    transformer_fields,
)
from llava_mcore.models.language.shape import DecoderShape, rope_from_hf
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import COLUMN, REPLICATED, ROW, Entry

_MORE_ROWS = 8
"""Tokens that the decoder reads and does not predict, as transformers' class has them: the image's."""


def cross_layers(hf: PretrainedConfig) -> tuple[int, ...]:
    """Return the layers, from 0, that attend to images.

    Raises:
        ConversionError: a layer does not exist.
    """
    layers = tuple(sorted({int(x) for x in hf.cross_attention_layers}))
    if layers and not 0 <= layers[0] <= layers[-1] < hf.num_hidden_layers:
        raise ConversionError(
            f"text_config.cross_attention_layers = {list(layers)}: there are layers 0 to {hf.num_hidden_layers - 1}"
        )
    return layers


class MllamaText(LanguageFamily):
    """The decoder of MllamaForConditionalGeneration."""

    model_types = ("mllama_text_model",)
    part_of_a_class = True

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: dropout, or a layer that does not exist.
        """
        if hf.dropout:
            raise ConversionError(f"text_config.dropout = {hf.dropout} is not supported; it must be 0")
        cross_layers(hf)
        return transformer_fields(hf) | {"hetereogenous_dist_checkpoint": True}  # megatron-core's spelling

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return what TransformerConfig does not say."""
        return DecoderShape(rope_from_hf(hf, MllamaRotaryEmbedding), cross_layers=cross_layers(hf))

    def embedding_rows(self, hf: PretrainedConfig) -> int:
        """Return the tokens that have an embedding, more than the output layer predicts."""
        return int(hf.vocab_size) + _MORE_ROWS

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        layers, crossing = range(hf.num_hidden_layers), cross_layers(hf)
        first, second = norm_entries(names)
        into_and_out_of = mlp_entries(names)
        of_mlp = {x.megatron for x in into_and_out_of}
        attention = [x for x in projection_entries(hf, names) if x.megatron not in of_mlp]
        return [
            *expand_layers([second, *into_and_out_of], hf),
            *(x for entry in (first, *attention) for x in entry.expand(layer=sorted({*layers} - {*crossing}))),
            *(x for entry in _cross_entries(names) for x in entry.expand(layer=crossing)),
        ]

    def layer_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights that a token meets; keys and values of images are counted with these."""
        keys_and_values = 2 * hf.hidden_size * head_dim(hf) * hf.num_key_value_heads
        return super().layer_weights(hf) - len(cross_layers(hf)) * keys_and_values

    def attention_products(self, hf: PretrainedConfig, *, num_tokens: int, num_pairs: int) -> int:
        """Return the FLOPs of the products of two activations in layers that attend to tokens. Those of tokens and
        images, a few percent of a model's, are not counted."""
        layers = hf.num_hidden_layers - len(cross_layers(hf))
        return int(4 * num_pairs * layers * hf.num_attention_heads * head_dim(hf))


def _cross_entries(names: TextNames) -> list[Entry]:
    """Return templates of a layer's attention to images, and of its gates."""
    m, h = names.megatron_layer, names.hf_layer
    inside, hf_attention = m + "cross_attention.", h + "cross_attn."
    return [
        Entry(m + "pre_cross_attn_layernorm.weight", h + "input_layernorm.weight", REPLICATED),
        *(Entry(f"{inside}linear_{x}.weight", f"{hf_attention}{x}_proj.weight", COLUMN) for x in "qkv"),
        Entry(inside + "linear_proj.weight", hf_attention + "o_proj.weight", ROW),
        *(Entry(f"{inside}{x}_layernorm.weight", f"{hf_attention}{x}_norm.weight", REPLICATED) for x in "qk"),
        Entry(m + "cross_attn_bda.gate", h + "cross_attn_attn_gate", REPLICATED),
        Entry(m + "mlp_bda.gate", h + "cross_attn_mlp_gate", REPLICATED),
    ]
