"""DINOv2's tower, with and without registers: class token, layer scale, plain or gated MLP.

Hugging Face interpolates its position table for images of another size than the tower's; here images have that
size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from llava_mcore.models.activations import activation
from llava_mcore.models.vision.encoder_layers import (
    embedding_entries,
    encoder_fields,
    layer_entries,
    require,
    scale_entries,
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
    norm_before="norm1",
    query_key_value=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    attention_out="attention.output.dense",
    norm_between="norm2",
    into=("mlp.fc1",),
    out_of="mlp.fc2",
)
_REQUIRED = {"drop_path_rate": 0.0, "hidden_dropout_prob": 0.0, "qkv_bias": True}
_GATED_NAMES = replace(_NAMES, into=("mlp.weights_in",), out_of="mlp.weights_out")


class Dinov2(TileTower):
    """DINOv2's tower."""

    model_types = ("dinov2", "dinov2_with_registers")

    def tokens_before_patches(self, hf: PretrainedConfig) -> int:
        """Return the number of tokens before the patches: the class token and registers."""
        return 1 + _num_registers(hf)

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: stochastic depth or dropout, which are not applied here, or queries without biases.
        """
        require(hf, _REQUIRED)
        kind = "silu" if hf.use_swiglu_ffn else hf.hidden_act
        return encoder_fields(hf, num_layers) | {
            "ffn_hidden_size": self.ffn_size(hf),
            "gated_linear_unit": hf.use_swiglu_ffn,
            "activation_func": activation(kind, where="vision_config.hidden_act"),
            "attention_dropout": hf.attention_probs_dropout_prob,
        }

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside the MLPs; if they are gated, of the gate alone."""
        width = int(hf.hidden_size * hf.mlp_ratio)
        # DINOv2's rule: two thirds, so that three matrices weigh as much as two, rounded up to a multiple of 8.
        return (int(width * 2 / 3) + 7) // 8 * 8 if hf.use_swiglu_ffn else width

    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return the parts around the layers."""
        return VisionShape(
            image_side(hf),
            patch_side(hf),
            class_token=True,
            conv_bias=True,
            pre_norm=False,
            num_registers=_num_registers(hf),
            layer_scale=True,
            names=_GATED_NAMES if hf.use_swiglu_ffn else _NAMES,
            conv_name=_CONV,
            layers_name="encoder.layer.",
        )

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the used layers and of everything before them."""
        ends = embedding_entries(hf, megatron=megatron, prefix=prefix, conv=_CONV)
        if _num_registers(hf):
            ends.append(Entry(megatron + "registers", prefix + "embeddings.register_tokens", REPLICATED))
        return ends + _layer_entries(hf, megatron, prefix, range(num_layers))

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""
        rest = _layer_entries(hf, "", prefix, range(num_layers, hf.num_hidden_layers))
        mask = {f"{prefix}embeddings.mask_token": "stands for masked patches in DINOv2's own training"}
        return unused_layers(rest, num_layers) | unused_norm(prefix + "layernorm") | mask


def _layer_entries(hf: PretrainedConfig, megatron: str, prefix: str, layers: range) -> list[Entry]:
    inside = prefix + "encoder.layer."
    gated = hf.use_swiglu_ffn
    names = _GATED_NAMES if gated else _NAMES
    scales = scale_entries(
        megatron=megatron, prefix=inside, layers=layers, scales=("layer_scale1.lambda1", "layer_scale2.lambda1")
    )
    return layer_entries(hf, megatron=megatron, prefix=inside, layers=layers, names=names, gated=gated) + scales


def _num_registers(hf: PretrainedConfig) -> int:
    return int(hf.num_register_tokens) if hf.model_type == "dinov2_with_registers" else 0
