"""InternViT as transformers has it (internvl_vision, InternViT-300M): class token, layer scale."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.conversion.layouts import Reshape
from llava_mcore.conversion.mapping import Entry
from llava_mcore.conversion.sharding import REPLICATED
from llava_mcore.errors import ConversionError
from llava_mcore.models.activations import activation
from llava_mcore.models.names import LayerNames
from llava_mcore.models.vision.encoder_layers import (
    WEIGHT_BIAS,
    encoder_fields,
    layer_entries,
    scale_entries,
    unused_layers,
    unused_norm,
)
from llava_mcore.models.vision.transformer import VisionShape
from llava_mcore.towers import image_side, num_patches, patch_side

_CONV = "embeddings.patch_embeddings.projection"
_NAMES = LayerNames(
    norm_before="layernorm_before",
    query_key_value=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    attention_out="attention.projection_layer",
    norm_between="layernorm_after",
    into=("mlp.fc1",),
    out_of="mlp.fc2",
)
# What each key must be: InternViT-6B normalises queries and keys over all heads, which tensor parallelism cuts apart,
# and megatron-core gives either all matrices biases or none but query, key and value.
_REQUIRED = {
    "norm_type": "layer_norm",
    "use_qk_norm": False,
    "attention_bias": True,
    "use_absolute_position_embeddings": True,
    "hidden_dropout_prob": 0.0,
    "projection_dropout": 0.0,
}


def config_from_hf(hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return megatron-core TransformerConfig fields.

    Raises:
        ConversionError: a variant that is not supported (InternViT-6B).
    """
    values = hf.to_dict()
    for key, wanted in _REQUIRED.items():
        if values[key] != wanted:
            raise ConversionError(f"vision_config.{key} = {values[key]} is not supported; it must be {wanted}")
    return encoder_fields(hf, num_layers) | {
        "ffn_hidden_size": hf.intermediate_size,
        "activation_func": activation(hf.hidden_act, where="vision_config.hidden_act"),
        "attention_dropout": hf.attention_dropout,
    }


def shape(hf: PretrainedConfig) -> VisionShape:
    """Return what surrounds the layers."""
    return VisionShape(
        image_side(hf),
        patch_side(hf),
        class_token=True,
        conv_bias=True,
        pre_norm=False,
        layer_scale=True,
        names=_NAMES,
        conv_name=_CONV,
        layers_name="encoder.layer.",
    )


def weight_entries(hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
    """Return the entries of the layers that are used and of what comes before them."""
    width, rows = hf.hidden_size, num_patches(hf) + 1
    table = Reshape((1, rows, width), (rows, width))
    ends = [
        Entry(megatron + "class_token", prefix + "embeddings.cls_token", REPLICATED),
        *Entry(megatron + "conv1.{wb}", f"{prefix}{_CONV}.{{wb}}", REPLICATED).expand(wb=WEIGHT_BIAS),
        Entry(megatron + "position_embeddings.weight", prefix + "embeddings.position_embeddings", REPLICATED, table),
    ]
    return ends + _layer_entries(hf, megatron, prefix, range(num_layers))


def unused(hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
    """Name the tensors that training does not use, with the reason."""
    rest = _layer_entries(hf, "", prefix, range(num_layers, hf.num_hidden_layers))
    mask = {f"{prefix}embeddings.mask_token": "stands for masked patches in InternViT's own training"}
    return unused_layers(rest, num_layers) | unused_norm(prefix + "layernorm") | mask


def _layer_entries(hf: PretrainedConfig, megatron: str, prefix: str, layers: range) -> list[Entry]:
    inside = prefix + "encoder.layer."
    scales = scale_entries(megatron=megatron, prefix=inside, layers=layers, scales=("lambda_1", "lambda_2"))
    return layer_entries(hf, megatron=megatron, prefix=inside, layers=layers, names=_NAMES) + scales
