"""Qwen3.5 (dense): gated delta nets and, in every fourth layer, attention with an output gate.

Norms are zero-centered, except the one inside the delta nets. Attention rotates a part of each head, by positions of
time, height and width.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from llava_mcore.errors import ConversionError
from llava_mcore.models.language.delta_net import PROJECTIONS
from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.dense import (
    head_dim,
    head_norm_entries,
    mlp_entries,
    norm_entries,
    transformer_fields,
)
from llava_mcore.models.language.shape import DecoderShape, mrope_from_hf
from llava_mcore.weights.layouts import ConcatRows, FuseGatedQKV
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import COLUMN, REPLICATED, ROW, Entry, Shard

DELTA, ATTENTION = "linear_attention", "full_attention"
"""Kinds of layers in `layer_types`."""


def key_rows(hf: PretrainedConfig) -> int:
    """Return the width of all key heads of a delta net, which is that of its queries too."""
    return int(hf.linear_num_key_heads * hf.linear_key_head_dim)


def value_rows(hf: PretrainedConfig) -> int:
    """Return the width of all value heads of a delta net."""
    return int(hf.linear_num_value_heads * hf.linear_value_head_dim)


class Qwen35Text(LanguageFamily):
    """The decoder of Qwen3.5, dense."""

    model_types = ("qwen3_5_text",)
    part_of_a_class = True
    width_key: ClassVar[str] = "intermediate_size"
    """Config key of the width inside an MLP."""
    rotary: ClassVar[type[nn.Module]] = Qwen3_5TextRotaryEmbedding

    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: an unknown kind of layer, an activation that the delta net does not have, or value heads
                that the key heads do not divide.
        """
        unknown = sorted(set(hf.layer_types) - {DELTA, ATTENTION})
        if unknown:
            raise ConversionError(
                f"text_config.layer_types: {', '.join(unknown)}; known: {DELTA}, {ATTENTION}"
            )  # fmt: skip
        if hf.hidden_act != "silu":
            raise ConversionError(
                f"text_config.hidden_act = {hf.hidden_act!r}: gated delta nets are computed with silu"
            )
        if hf.linear_num_value_heads % hf.linear_num_key_heads:
            raise ConversionError(
                f"text_config.linear_num_value_heads = {hf.linear_num_value_heads} is not a multiple of "
                f"linear_num_key_heads = {hf.linear_num_key_heads}"
            )
        # Attention has gates; the other layers are delta nets.
        return transformer_fields(hf, width_key=self.width_key) | {
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == DELTA) for kind in hf.layer_types],
            "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
            "linear_key_head_dim": hf.linear_key_head_dim,
            "linear_value_head_dim": hf.linear_value_head_dim,
            "linear_num_key_heads": hf.linear_num_key_heads,
            "linear_num_value_heads": hf.linear_num_value_heads,
        }

    def delta_dims(self, hf: PretrainedConfig) -> dict[str, int]:
        """Return the fields of ModelDims about gated delta nets; empty if there are none."""
        if DELTA not in hf.layer_types:
            return {}
        heads = int(hf.linear_num_value_heads)
        return {
            "delta_key_heads": int(hf.linear_num_key_heads),
            "delta_value_heads": heads,
            "delta_width": 2 * (key_rows(hf) + value_rows(hf) + heads),
        }

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return what TransformerConfig does not say."""
        return DecoderShape(mrope_from_hf(hf, self.rotary))

    def layer_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights that a token meets in the matrices of all layers."""
        h, num_delta = hf.hidden_size, sum(kind == DELTA for kind in hf.layer_types)
        attention = h * head_dim(hf) * (3 * hf.num_attention_heads + 2 * hf.num_key_value_heads)  # the gate's too
        delta = h * (2 * key_rows(hf) + 3 * value_rows(hf) + 2 * hf.linear_num_value_heads)
        mlps = hf.num_hidden_layers * self.mlp_weights(hf)
        return int((hf.num_hidden_layers - num_delta) * attention + num_delta * delta + mlps)

    def mlp_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights that a token meets in a layer's MLP."""
        return int(3 * hf.hidden_size * hf.intermediate_size)

    def attention_products(self, hf: PretrainedConfig, *, num_tokens: int, num_pairs: int) -> int:
        """Return the FLOPs of the products of two activations: a delta net reads its state twice and writes it once."""
        num_delta = sum(kind == DELTA for kind in hf.layer_types)
        state = hf.linear_num_value_heads * hf.linear_key_head_dim * hf.linear_value_head_dim
        pairs = (hf.num_hidden_layers - num_delta) * num_pairs
        return int(4 * pairs * hf.num_attention_heads * head_dim(hf) + 3 * 2 * num_tokens * num_delta * state)

    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
        layers = {kind: [i for i, x in enumerate(hf.layer_types) if x == kind] for kind in (DELTA, ATTENTION)}
        both = [*norm_entries(names), *self.mlp_entries(hf, names)]
        return [
            *(x for entry in both for x in entry.expand(layer=range(hf.num_hidden_layers))),
            *(x for entry in _attention_entries(hf, names) for x in entry.expand(layer=layers[ATTENTION])),
            *(x for entry in _delta_entries(hf, names) for x in entry.expand(layer=layers[DELTA])),
        ]

    def mlp_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return templates of what each layer has after its attention or delta net."""
        return mlp_entries(names)


def _attention_entries(hf: PretrainedConfig, names: TextNames) -> list[Entry]:
    """Return templates of attention, whose q_proj also has the gate."""
    m, h = names.megatron_layer + "self_attention.", names.hf_layer + "self_attn."
    qkv = tuple(f"{h}{x}_proj.weight" for x in "qkv")
    fuse = FuseGatedQKV(hf.num_attention_heads, hf.num_key_value_heads)
    return [
        Entry(m + "linear_qkv.weight", qkv, COLUMN, fuse),
        Entry(m + "linear_proj.weight", h + "o_proj.weight", ROW),
        *head_norm_entries(names),
    ]


def _delta_entries(hf: PretrainedConfig, names: TextNames) -> list[Entry]:
    """Return templates of a delta net."""
    m, h = names.megatron_layer + "self_attention.", names.hf_layer + "linear_attn."
    keys, values, heads = key_rows(hf), value_rows(hf), int(hf.linear_num_value_heads)
    of_convolution = (keys, keys, values)
    fuse = ConcatRows((sum(of_convolution), values, heads, heads))
    return [
        Entry(
            m + "in_proj.weight",
            tuple(f"{h}{x}.weight" for x in PROJECTIONS),
            Shard(0, sections=(*of_convolution, values, heads, heads)),
            fuse,
        ),
        Entry(m + "conv1d.weight", h + "conv1d.weight", Shard(0, sections=of_convolution)),
        Entry(m + "A_log", h + "A_log", COLUMN),
        Entry(m + "dt_bias", h + "dt_bias", COLUMN),
        Entry(m + "out_norm.weight", h + "norm.weight", REPLICATED),
        Entry(m + "out_proj.weight", h + "out_proj.weight", ROW),
    ]
