"""Layers that CLIP's and SigLIP's encoders share: configuration and weight entries."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.conversion.layouts import FuseQKV
from llava_mcore.conversion.mapping import Entry
from llava_mcore.conversion.sharding import COLUMN, REPLICATED, ROW
from llava_mcore.models.activations import activation

WEIGHT_BIAS = ("weight", "bias")


def transformer_fields(hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return megatron-core TransformerConfig fields of an HF vision config, for the layers that are used."""
    return {
        "num_layers": num_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "normalization": "LayerNorm",
        "layernorm_epsilon": hf.layer_norm_eps,
        "activation_func": activation(hf.hidden_act, where="vision_config.hidden_act"),
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "attention_dropout": hf.attention_dropout,
        "hidden_dropout": 0.0,
    }


def layer_entries(hf: PretrainedConfig, *, megatron: str, prefix: str, layers: range) -> list[Entry]:
    """Return the entries of some encoder layers."""
    m, h = megatron + "decoder.layers.{layer}.", prefix + "encoder.layers.{layer}."
    qkv = tuple(h + f"self_attn.{x}_proj.{{wb}}" for x in "qkv")
    fuse = FuseQKV(hf.num_attention_heads, hf.num_attention_heads)
    templates = [
        Entry(m + "input_layernorm.{wb}", h + "layer_norm1.{wb}", REPLICATED),
        Entry(m + "self_attention.linear_qkv.{wb}", qkv, COLUMN, fuse),
        Entry(m + "self_attention.linear_proj.weight", h + "self_attn.out_proj.weight", ROW),
        Entry(m + "self_attention.linear_proj.bias", h + "self_attn.out_proj.bias", REPLICATED),
        Entry(m + "pre_mlp_layernorm.{wb}", h + "layer_norm2.{wb}", REPLICATED),
        Entry(m + "mlp.linear_fc1.{wb}", h + "mlp.fc1.{wb}", COLUMN),
        Entry(m + "mlp.linear_fc2.weight", h + "mlp.fc2.weight", ROW),
        Entry(m + "mlp.linear_fc2.bias", h + "mlp.fc2.bias", REPLICATED),
    ]
    return [x for entry in templates for x in entry.expand(layer=layers, wb=WEIGHT_BIAS)]


def unused_layers(hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
    """Name the tensors after the last feature layer, with the reason."""
    rest = range(num_layers, hf.num_hidden_layers)
    entries = layer_entries(hf, megatron="", prefix=prefix, layers=rest)
    reason = f"vision layer after the last feature layer ({num_layers})"
    post_norm = {f"{prefix}post_layernorm.{wb}": "norm after the last vision layer" for wb in WEIGHT_BIAS}
    return {name: reason for entry in entries for name in entry.hf_names} | post_norm
