"""SigLIP's vision tower: no class token, no norm before the layers, convolution with bias."""

from __future__ import annotations

from typing import Any, ClassVar

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
from llava_mcore.weights.table import REPLICATED, Entry

# The attention-pooling head; torch's MultiheadAttention names its input projection with an underscore.
_HEAD_MODULES = ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
_HEAD = (
    "probe",
    "attention.in_proj_weight",
    "attention.in_proj_bias",
    *(f"{module}.{wb}" for module in _HEAD_MODULES for wb in WEIGHT_BIAS),
)


class Siglip(TileTower):
    """SigLIP's vision tower, and that of SigLIP 2 with a fixed resolution."""

    model_types: ClassVar[tuple[str, ...]] = ("siglip_vision_model",)
    pair: ClassVar[str | None] = "siglip"
    wrapped = True
    interpolates = False

    def tokens_before_patches(self, hf: PretrainedConfig) -> int:
        """Return 0."""
        return 0

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields."""
        return transformer_fields(hf, num_layers)

    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return the parts around the layers."""
        return VisionShape(image_side(hf), patch_side(hf), class_token=False, conv_bias=True, pre_norm=False)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the used layers and of everything before them."""
        conv = Entry(megatron + "conv1.{wb}", prefix + "embeddings.patch_embedding.{wb}", REPLICATED)
        positions = Entry(
            megatron + "position_embeddings.weight", prefix + "embeddings.position_embedding.weight", REPLICATED
        )
        layers = layer_entries(hf, megatron=megatron, prefix=prefix + "encoder.layers.", layers=range(num_layers))
        return [*conv.expand(wb=WEIGHT_BIAS), positions, *layers]

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""
        rest = range(num_layers, hf.num_hidden_layers)
        after = unused_layers(
            layer_entries(hf, megatron="", prefix=prefix + "encoder.layers.", layers=rest), num_layers
        ) | unused_norm(prefix + "post_layernorm")
        head = {f"{prefix}head.{name}": "attention-pooling head" for name in _HEAD}
        buffer = {f"{prefix}embeddings.position_ids": "buffer of older transformers versions"}
        return after | head | buffer
