"""Mllama's vision tower: its weights, and the work that it does."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import MediaWork
from llava_mcore.models.activations import activation
from llava_mcore.models.vision.encoder_layers import WEIGHT_BIAS, layer_entries
from llava_mcore.models.vision.families.base import TowerWork, VisionFamily
from llava_mcore.models.vision.features import FeatureChoice, image_side, patch_side
from llava_mcore.models.vision.tiled import TiledShape, TiledTransformer
from llava_mcore.weights.names import LayerNames
from llava_mcore.weights.table import REPLICATED, Entry

NAMES = LayerNames(
    norm_before="input_layernorm",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.o_proj",
    norm_between="post_attention_layernorm",
    into=("mlp.fc1",),
    out_of="mlp.fc2",
)
_ENDS = {
    "class_token": "class_embedding",
    "conv1.weight": "patch_embedding.weight",
    "position_embeddings": "gated_positional_embedding.embedding",
    "position_gate": "gated_positional_embedding.gate",
    "tile_position_embeddings.weight": "gated_positional_embedding.tile_embedding.weight",
    "pre_tile_embeddings.weight": "pre_tile_positional_embedding.embedding.weight",
    "pre_tile_gate": "pre_tile_positional_embedding.gate",
    "post_tile_embeddings.weight": "post_tile_positional_embedding.embedding.weight",
    "post_tile_gate": "post_tile_positional_embedding.gate",
    **{f"ln_{x}.{wb}": f"layernorm_{x}.{wb}" for x in ("pre", "post") for wb in WEIGHT_BIAS},
}
"""Parts around the layers: our names and those in files."""


class MllamaTower(VisionFamily):
    """MllamaVisionModel. Its layers are the local ones and then the global ones."""

    model_types = ("mllama_vision_model",)
    part_of_a_class = True

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields.

        Raises:
            ConversionError: channels that are not red, green and blue, or a tower without layers of both kinds.
        """
        if hf.num_channels != 3:
            raise ConversionError(f"vision_config.num_channels = {hf.num_channels} is not supported; it must be 3")
        if hf.num_global_layers < 1:
            raise ConversionError("vision_config.num_global_layers must be at least 1")
        return {
            "num_layers": num_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": hf.intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "activation_func": activation(hf.hidden_act, where="vision_config.hidden_act"),
            "normalization": "LayerNorm",
            "layernorm_epsilon": hf.norm_eps,
            "add_bias_linear": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": hf.initializer_range,
        }

    def shape(self, hf: PretrainedConfig) -> TiledShape:
        """Return what surrounds the layers."""
        return TiledShape(
            image_side(hf),
            patch_side(hf),
            num_tiles=hf.max_num_tiles,
            num_local=hf.num_hidden_layers,
            num_ratios=hf.max_aspect_ratio_id,
            names=NAMES,
        )

    def build(self, hf: PretrainedConfig, config: TransformerConfig, features: FeatureChoice) -> TiledTransformer:
        """Build the tower's module."""
        return TiledTransformer(config, self.shape(hf), features)

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of all layers and of everything around them."""
        ends = [
            Entry(megatron + megatron_name, prefix + hf_name, REPLICATED) for megatron_name, hf_name in _ENDS.items()
        ]
        layers = [
            *_layers(hf, megatron, prefix + "transformer.layers.", hf.num_hidden_layers),
            *_layers(hf, megatron + "global_", prefix + "global_transformer.layers.", hf.num_global_layers),
        ]
        m, h = megatron + "global_decoder.layers.{layer}.", prefix + "global_transformer.layers.{layer}."
        gates = [
            Entry(m + "self_attn_bda.gate", h + "gate_attn", REPLICATED),
            Entry(m + "mlp_bda.gate", h + "gate_ffn", REPLICATED),
        ]
        return [*ends, *layers, *(x for gate in gates for x in gate.expand(layer=range(hf.num_global_layers)))]

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return nothing: all tensors are used."""
        return {}

    def work(self, hf: PretrainedConfig, media: MediaWork, num_layers: int) -> TowerWork:
        """Return what the layers compute on: padding of an image too, which its patches see."""
        shape = self.shape(hf)
        positions = shape.num_tiles * shape.padded_positions
        images = media.num_sequences
        return TowerWork(media.num_patches, images * positions, images * positions**2 * num_layers)

    def describe(self, hf: PretrainedConfig) -> str:
        """Say which images the tower takes."""
        side = image_side(hf)
        return f"up to {hf.max_num_tiles} tiles of {side} x {side} pixels in patches of {patch_side(hf)}"

    def has_class_token(self, hf: PretrainedConfig) -> bool:
        """Return True."""
        return True

    def num_layers(self, hf: PretrainedConfig) -> int:
        """Return the number of local and global layers."""
        return int(hf.num_hidden_layers + hf.num_global_layers)


def _layers(hf: PretrainedConfig, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
    """Return the entries of some layers, whose attention has no biases."""
    entries = layer_entries(
        hf, megatron=megatron, prefix=prefix, layers=range(num_layers), names=NAMES, qkv_bias=False
    )  # fmt: skip
    return [x for x in entries if not x.megatron.endswith("linear_proj.bias")]
