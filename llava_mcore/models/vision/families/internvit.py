"""InternViT as transformers has it (internvl_vision): class token, layer scale.

InternViT-300M has layer norms, and biases everywhere. InternViT-6B has RMSNorm, also of queries and keys over all
heads, and no biases of query, key and value.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.models.vision.encoder_layers import (
    embedding_entries,
    layer_entries,
    require,
    scale_entries,
    transformer_fields,
    unused_layers,
    unused_norm,
)
from llava_mcore.models.vision.families.base import TileTower
from llava_mcore.models.vision.features import image_side, patch_side
from llava_mcore.models.vision.transformer import VisionShape
from llava_mcore.weights.names import LayerNames
from llava_mcore.weights.table import REPLICATED, Entry

_CONV = "embeddings.patch_embeddings.projection"
_NAMES = LayerNames(
    norm_before="layernorm_before",
    query_key_value=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    attention_out="attention.projection_layer",
    norm_between="layernorm_after",
    into=("mlp.fc1",),
    out_of="mlp.fc2",
)
_REQUIRED = {"use_absolute_position_embeddings": True, "hidden_dropout_prob": 0.0, "projection_dropout": 0.0}
_NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
"""megatron-core's names of norm_type."""


class InternVit(TileTower):
    """InternViT."""

    model_types = ("internvl_vision",)

    def tokens_before_patches(self, hf: PretrainedConfig) -> int:
        """Return 1: the class token."""
        return 1

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: a variant that is not supported.
        """
        require(hf, _REQUIRED)
        if hf.norm_type not in _NORMS:
            raise ConversionError(f"vision_config.norm_type = {hf.norm_type!r} is not known: use {' or '.join(_NORMS)}")
        return transformer_fields(hf, num_layers) | {"normalization": _NORMS[hf.norm_type]}

    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return the parts around the layers."""
        return VisionShape(
            image_side(hf),
            patch_side(hf),
            class_token=True,
            conv_bias=True,
            pre_norm=False,
            layer_scale=True,
            qkv_bias=hf.attention_bias,
            normed_heads=hf.use_qk_norm,
            names=_NAMES,
            conv_name=_CONV,
            layers_name="encoder.layer.",
        )

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the used layers and of everything before them."""
        ends = embedding_entries(hf, megatron=megatron, prefix=prefix, conv=_CONV)
        return ends + _layer_entries(hf, megatron, prefix, range(num_layers))

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""
        rest = _layer_entries(hf, "", prefix, range(num_layers, hf.num_hidden_layers))
        mask = {f"{prefix}embeddings.mask_token": "stands for masked patches in InternViT's own training"}
        return unused_layers(rest, num_layers) | unused_norm(prefix + "layernorm") | mask


def _layer_entries(hf: PretrainedConfig, megatron: str, prefix: str, layers: range) -> list[Entry]:
    inside, m = prefix + "encoder.layer.", megatron + "decoder.layers.{layer}.self_attention."
    scales = scale_entries(megatron=megatron, prefix=inside, layers=layers, scales=("lambda_1", "lambda_2"))
    norms = [
        Entry(f"{m}{megatron_name}_norm.weight", f"{inside}{{layer}}.attention.{hf_name}_norm.weight", REPLICATED)
        for megatron_name, hf_name in (("query", "q"), ("key", "k"))
        if hf.use_qk_norm
    ]
    of_heads = [x for entry in norms for x in entry.expand(layer=layers)]
    options = {"norm_bias": hf.norm_type == "layer_norm", "qkv_bias": hf.attention_bias}
    common = layer_entries(hf, megatron=megatron, prefix=inside, layers=layers, names=_NAMES, **options)
    return common + scales + of_heads
