"""CLIP's vision tower: class token, norm before the layers, convolution without bias."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from llava_mcore.models.vision.encoder_layers import (
    WEIGHT_BIAS,
    layer_entries,
    transformer_fields,
    unused_layers,
    unused_norm,
)
from llava_mcore.models.vision.families.base import TileTower
from llava_mcore.models.vision.features import image_side, patch_side
from llava_mcore.models.vision.transformer import VisionShape
from llava_mcore.weights.layouts import Reshape
from llava_mcore.weights.table import REPLICATED, Entry


class Clip(TileTower):
    """CLIP's vision tower."""

    model_types = ("clip_vision_model",)
    pair = "clip"
    wrapped = True
    interpolates = False

    def tokens_before_patches(self, hf: PretrainedConfig) -> int:
        """Return 1: the class token."""
        return 1

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return transformer_fields(hf, num_layers)

    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return the parts around the layers."""
        return VisionShape(image_side(hf), patch_side(hf), class_token=True, conv_bias=False, pre_norm=True)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the used layers and of everything before them."""
        width = hf.hidden_size
        ends = [
            Entry(
                megatron + "class_token",
                prefix + "embeddings.class_embedding",
                REPLICATED,
                Reshape((width,), (1, 1, width)),
            ),
            Entry(megatron + "conv1.weight", prefix + "embeddings.patch_embedding.weight", REPLICATED),
            Entry(megatron + "position_embeddings.weight", prefix + "embeddings.position_embedding.weight", REPLICATED),
            # "layrnorm" is Hugging Face's spelling.
            *Entry(megatron + "ln_pre.{wb}", prefix + "pre_layrnorm.{wb}", REPLICATED).expand(wb=WEIGHT_BIAS),
        ]
        return ends + layer_entries(hf, megatron=megatron, prefix=prefix + "encoder.layers.", layers=range(num_layers))

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""
        rest = range(num_layers, hf.num_hidden_layers)
        after = unused_layers(
            layer_entries(hf, megatron="", prefix=prefix + "encoder.layers.", layers=rest), num_layers
        ) | unused_norm(prefix + "post_layernorm")
        return after | {f"{prefix}embeddings.position_ids": "buffer of older transformers versions"}
