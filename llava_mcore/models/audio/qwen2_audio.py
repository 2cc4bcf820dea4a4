"""The family of Qwen2-Audio's encoder: Whisper's, without a bias for keys, with pooled features."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from llava_mcore.media.batch_fields import MediaWork
from llava_mcore.models.activations import activation
from llava_mcore.models.audio.encoder import AudioShape, AudioTransformer
from llava_mcore.models.vision.encoder_layers import WEIGHT_BIAS, layer_entries, require
from llava_mcore.models.vision.families.base import TowerWork, VisionFamily
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.weights.layouts import FuseQKV, FuseQV
from llava_mcore.weights.names import LayerNames
from llava_mcore.weights.table import COLUMN, REPLICATED, Entry

NORM_EPS = 1e-5
"""Epsilon of every norm of the encoder; transformers has no setting for it."""
_NAMES = LayerNames(
    norm_before="self_attn_layer_norm",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.out_proj",
    norm_between="final_layer_norm",
    into=("fc1",),
    out_of="fc2",
)
_QKV_BIAS = "linear_qkv.bias"


class Qwen2AudioTower(VisionFamily):
    """Qwen2AudioEncoder."""

    model_types = ("qwen2_audio_encoder",)
    part_of_a_class = True
    name_in_messages = "audio encoder"
    constants = ("position_embeddings.weight",)

    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. ConversionError for kinds of dropout that are not computed."""
        require(hf, {"dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0}, section="audio_config")
        return {
            "num_layers": num_layers,
            "hidden_size": hf.d_model,
            "ffn_hidden_size": hf.encoder_ffn_dim,
            "num_attention_heads": hf.encoder_attention_heads,
            "activation_func": activation(hf.activation_function, where="audio_config.activation_function"),
            "normalization": "LayerNorm",
            "layernorm_epsilon": NORM_EPS,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "hidden_dropout": 0.0,
            "attention_dropout": hf.attention_dropout,
        }

    def build(self, hf: PretrainedConfig, config: TransformerConfig, features: FeatureChoice) -> AudioTransformer:
        """Build the encoder's module."""
        return AudioTransformer(config, AudioShape(hf.num_mel_bins, hf.max_source_positions, _NAMES))

    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of convolutions, positions, layers and the norm after them."""
        ends = [
            *Entry(megatron + "{conv}.{wb}", prefix + "{conv}.{wb}", REPLICATED).expand(
                conv=("conv1", "conv2"), wb=WEIGHT_BIAS
            ),
            Entry(megatron + "position_embeddings.weight", prefix + "embed_positions.weight", REPLICATED),
            *Entry(megatron + "ln_post.{wb}", prefix + "layer_norm.{wb}", REPLICATED).expand(wb=WEIGHT_BIAS),
        ]
        layers = layer_entries(hf, megatron=megatron, prefix=prefix + "layers.", layers=range(num_layers), names=_NAMES)
        return ends + [_without_key_bias(entry) for entry in layers]

    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return nothing: all layers are used."""
        return {}

    def work(self, hf: PretrainedConfig, media: MediaWork, num_layers: int) -> TowerWork:
        """Return what the layers compute on: the hidden frames of clips."""
        return TowerWork(media.num_patches, media.num_patches, media.num_pairs * num_layers)

    def embedding_products(self, hf: PretrainedConfig, num_patches: int) -> list[int]:
        """Return the FLOPs of both convolutions for this many hidden frames; the first runs on twice as many."""
        width = int(hf.d_model)
        return [2 * 2 * num_patches * 3 * int(hf.num_mel_bins) * width, 2 * num_patches * 3 * width * width]

    def describe(self, hf: PretrainedConfig) -> str:
        """Say which clips the encoder takes."""
        return f"clips of up to {2 * hf.max_source_positions} frames of {hf.num_mel_bins} mel bins"


def _without_key_bias(entry: Entry) -> Entry:
    """Return the entry of a fused bias without the keys' part, which files do not have; other entries unchanged."""
    if not entry.megatron.endswith(_QKV_BIAS):
        return entry
    assert isinstance(entry.layout, FuseQKV)
    query, _, value = entry.hf_names
    return Entry(entry.megatron, (query, value), COLUMN, FuseQV(entry.layout.heads))
