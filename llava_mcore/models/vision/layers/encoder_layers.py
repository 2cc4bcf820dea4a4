"""Layers of the towers' encoders: configuration and weight entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.models.activations import activation
from llava_mcore.models.vision.geometry import num_patches
from llava_mcore.weights.layouts import Concat, Copy, FuseQKV, PadColumns, PadParts, Regroup, Reshape, TensorTransform
from llava_mcore.weights.names import LayerNames
from llava_mcore.weights.table import COLUMN, GATED_COLUMN, REPLICATED, ROW, Entry

WEIGHT_BIAS = ("weight", "bias")

# CLIP's and SigLIP's names.
USUAL_NAMES = LayerNames(
    norm_before="layer_norm1",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.out_proj",
    norm_between="layer_norm2",
    into=("mlp.fc1",),
    out_of="mlp.fc2",
)


def transformer_fields(hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return megatron-core TransformerConfig fields of CLIP's and SigLIP's configs, for the layers that are used."""
    return encoder_fields(hf, num_layers) | {
        "ffn_hidden_size": hf.intermediate_size,
        "activation_func": activation(hf.hidden_act, where="vision_config.hidden_act"),
        "attention_dropout": hf.attention_dropout,
    }


def encoder_fields(hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return the TransformerConfig fields that every tower's config gives under the same names."""
    return {
        "num_layers": num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "normalization": "LayerNorm",
        "layernorm_epsilon": hf.layer_norm_eps,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "hidden_dropout": 0.0,
    }


def require(
    hf: PretrainedConfig, expected: Mapping[str, Any], *, section: str = "vision_config", advice: str = ""
) -> None:
    """Check required values in a tower's config. ConversionError lists all others, and ends with `advice`."""
    values = hf.to_dict()
    mismatches = [
        f"{section}.{key} = {values[key]} is not supported; it must be {value}"
        for key, value in expected.items()
        if values[key] != value
    ]
    if mismatches:
        raise ConversionError("\n".join([*mismatches, *([advice] if advice else [])]))


def embedding_entries(hf: PretrainedConfig, *, megatron: str, prefix: str, conv: str) -> list[Entry]:
    """Return the entries of class token, patches and positions, the latter with a batch dimension of one.

    `conv`: the convolution's name below prefix.
    """
    width, rows = hf.hidden_size, num_patches(hf) + 1
    table = Reshape((1, rows, width), (rows, width))
    return [
        Entry(megatron + "class_token", prefix + "embeddings.cls_token", REPLICATED),
        *Entry(megatron + "conv1.{wb}", f"{prefix}{conv}.{{wb}}", REPLICATED).expand(wb=WEIGHT_BIAS),
        Entry(megatron + "position_embeddings.weight", prefix + "embeddings.position_embeddings", REPLICATED, table),
    ]


def layer_entries(
    hf: PretrainedConfig,
    *,
    megatron: str,
    prefix: str,
    layers: range,
    names: LayerNames = USUAL_NAMES,
    gated: bool = False,
    norm_bias: bool = True,
    ffn: tuple[int, int] | None = None,
) -> list[Entry]:
    """Return the entries of some encoder layers.

    Args:
        prefix: of the layers in the files, up to the number.
        names: of the modules inside a layer.
        gated: whether the MLP's first matrix holds a gate and a value, of equal size.
        norm_bias: whether norms have one.
        ffn: the width inside the MLPs in the files, and in the model; None: they are equal.
    """
    m, h = megatron + "decoder.layers.{layer}.", prefix + "{layer}."
    qkv, into = (tuple(f"{h}{name}.{{wb}}" for name in x) for x in (names.query_key_value, names.into))
    heads = hf.num_attention_heads
    fuse: TensorTransform = FuseQKV(heads, heads) if len(qkv) > 1 else Regroup(heads, heads)
    stack: TensorTransform = Concat(len(into)) if len(into) > 1 else Copy()
    narrow: TensorTransform = Copy()
    if ffn is not None and ffn[0] != ffn[1]:
        stack, narrow = PadParts(len(into), *ffn), PadColumns(*ffn)
    norms = [
        Entry(m + "input_layernorm.{wb}", f"{h}{names.norm_before}.{{wb}}", REPLICATED),
        Entry(m + "pre_mlp_layernorm.{wb}", f"{h}{names.norm_between}.{{wb}}", REPLICATED),
    ]
    templates = [
        Entry(m + "mlp.linear_fc1.{wb}", into, GATED_COLUMN if gated else COLUMN, stack),
        Entry(m + "self_attention.linear_qkv.{wb}", qkv, COLUMN, fuse),
        Entry(m + "self_attention.linear_proj.weight", f"{h}{names.attention_out}.weight", ROW),
        Entry(m + "self_attention.linear_proj.bias", f"{h}{names.attention_out}.bias", REPLICATED),
        Entry(m + "mlp.linear_fc2.weight", f"{h}{names.out_of}.weight", ROW, narrow),
        Entry(m + "mlp.linear_fc2.bias", f"{h}{names.out_of}.bias", REPLICATED),
    ]
    of_norms = WEIGHT_BIAS if norm_bias else WEIGHT_BIAS[:1]
    return [
        x
        for entries, endings in ((norms, of_norms), (templates, WEIGHT_BIAS))
        for entry in entries
        for x in entry.expand(layer=layers, wb=endings)
    ]


def scale_entries(*, megatron: str, prefix: str, layers: range, scales: tuple[str, str]) -> list[Entry]:
    """Return the entries of layer scales, after attention and after the MLP."""
    m, h = megatron + "decoder.layers.{layer}.", prefix + "{layer}."
    places = zip(("self_attn_bda.scale", "mlp_bda.scale"), scales, strict=True)
    templates = [Entry(m + megatron_name, h + hf_name, REPLICATED) for megatron_name, hf_name in places]
    return [x for entry in templates for x in entry.expand(layer=layers)]


def unused_layers(entries: list[Entry], num_layers: int) -> dict[str, str]:
    """Return the tensors of layers after the last feature layer, with the reason."""
    reason = f"vision layer after the last feature layer ({num_layers})"
    return {name: reason for entry in entries for name in entry.hf_names}


def unused_norm(name: str) -> dict[str, str]:
    """Return the tower's last norm, with the reason."""
    return {f"{name}.{wb}": "norm after the last vision layer" for wb in WEIGHT_BIAS}
