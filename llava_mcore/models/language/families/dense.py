"""Shared by the dense decoder families:  RMSNorm, SwiGLU, grouped queries, rotary positions, no biases.

A family's file has the differences. Entries have Megatron names on the left, Hugging Face names on the right.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.models.activations import activation
from llava_mcore.weights.layouts import Concat, FuseQKV, PadRows
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import COLUMN, GATED_COLUMN, REPLICATED, ROW, Entry


def head_dim(hf: PretrainedConfig) -> int:
    """Return the size of one attention head: explicit in some families, else hidden size / heads."""
    explicit = hf.to_dict().get("head_dim")
    return explicit or hf.hidden_size // hf.num_attention_heads


def transformer_fields(
    hf: PretrainedConfig, *, activation_key: str = "hidden_act", width_key: str = "intermediate_size"
) -> dict[str, Any]:
    """Return megatron-core TransformerConfig fields of an HF text config.

    Args:
        activation_key: the family's config key of the activation.
        width_key: that of the width inside an MLP.

    Raises:
        ConversionError: an unknown activation, or biases this decoder does not have.
    """
    values = hf.to_dict()
    # A bias that is not built would be dropped silently.
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ConversionError(
                f"text_config.{name} = true: {hf.model_type} decoders with biases on the output projection or "
                "the MLP are not supported"
            )
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": values[width_key],
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": activation(values[activation_key], where=f"text_config.{activation_key}"),
        "add_bias_linear": False,
        "attention_dropout": values.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": hf.initializer_range,
    }


def layer_entries(hf: PretrainedConfig, names: TextNames) -> list[Entry]:
    """Return the entries of a dense decoder's layers, as in most families."""
    return expand_layers([*norm_entries(names), *projection_entries(hf, names)], hf)


def norm_entries(names: TextNames) -> list[Entry]:
    """Return templates of the two norms before attention and MLP."""
    m, h = names.megatron_layer, names.hf_layer
    return [
        Entry(m + "input_layernorm.weight", h + "input_layernorm.weight", REPLICATED),
        Entry(m + "pre_mlp_layernorm.weight", h + "post_attention_layernorm.weight", REPLICATED),
    ]


def head_norm_entries(names: TextNames) -> list[Entry]:
    """Return templates of the norms on query and key heads, which some families have."""
    m, h = names.megatron_layer, names.hf_layer
    return [Entry(f"{m}self_attention.{x}_layernorm.weight", f"{h}self_attn.{x}_norm.weight", REPLICATED) for x in "qk"]


def output_entries(names: TextNames) -> list[Entry]:
    """Return templates of the last matrices of attention and MLP."""
    m, h = names.megatron_layer, names.hf_layer
    return [
        Entry(m + "self_attention.linear_proj.weight", h + "self_attn.o_proj.weight", ROW),
        Entry(m + "mlp.linear_fc2.weight", h + "mlp.down_proj.weight", ROW),
    ]


def mlp_entries(names: TextNames) -> list[Entry]:
    """Return templates of a gated MLP, whose matrices are separate in the files."""
    m, h = names.megatron_layer, names.hf_layer
    gate_up = (h + "mlp.gate_proj.weight", h + "mlp.up_proj.weight")
    return [
        Entry(m + "mlp.linear_fc1.weight", gate_up, GATED_COLUMN, Concat(2)),
        Entry(m + "mlp.linear_fc2.weight", h + "mlp.down_proj.weight", ROW),
    ]


def projection_entries(hf: PretrainedConfig, names: TextNames) -> list[Entry]:
    """Return templates of all matrices of a layer, which are separate in the files."""
    m, h = names.megatron_layer, names.hf_layer
    qkv = tuple(h + f"self_attn.{x}_proj.weight" for x in "qkv")
    into_mlp, _ = mlp_entries(names)
    fuse = FuseQKV(hf.num_attention_heads, hf.num_key_value_heads)
    return [
        Entry(m + "self_attention.linear_qkv.weight", qkv, COLUMN, fuse),
        into_mlp,
        *output_entries(names),
    ]


def end_entries(
    hf: PretrainedConfig, names: TextNames, *, padded_vocab_size: int, tied: bool, rows: int | None = None
) -> list[Entry]:
    """Return the entries outside the layers: embedding, final norm and, unless tied, the output layer.

    Args:
        rows: of the embedding in files; None: those of the output layer.
    """
    vocab = PadRows(hf.vocab_size, padded_vocab_size)
    embedded = vocab if rows is None else PadRows(rows, padded_vocab_size)
    m, h = names.megatron, names.hf
    entries = [
        Entry(m + "embedding.word_embeddings.weight", names.embedding, COLUMN, embedded),
        Entry(m + "decoder.final_layernorm.weight", h + "norm.weight", REPLICATED),
    ]
    if not tied:
        entries.append(Entry(m + "output_layer.weight", names.lm_head, COLUMN, vocab))
    return entries


def expand_layers(templates: list[Entry], hf: PretrainedConfig) -> list[Entry]:
    """Repeat {layer} templates for every layer."""
    return [x for entry in templates for x in entry.expand(layer=range(hf.num_hidden_layers))]
