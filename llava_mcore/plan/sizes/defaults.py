"""Defaults of transformers' config classes for values that config.json omits: the ones that sizes depend on.

`tests/unit/plan/test_read_config.py` compares them with the classes.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]


def _text(hidden: int, ffn: int | None, layers: int, heads: int, groups: int | None, vocab: int, **more: Any) -> Values:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        **more,
    }


_QWEN2 = _text(4096, 22016, 32, 32, 32, 151936, max_position_embeddings=32768)
_QWEN_VL = _text(8192, 29568, 80, 64, 8, 152064, max_position_embeddings=32768)
_GEMMA = _text(2304, 9216, 26, 8, 4, 256000, head_dim=256, max_position_embeddings=8192, sliding_window=4096)
_DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
_DELTA |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
TEXTS: dict[str, Values] = {
    "llama": _text(4096, 11008, 32, 32, None, 32000, max_position_embeddings=2048),
    "mistral": _text(4096, 14336, 32, 32, 8, 32000, max_position_embeddings=4096 * 32, sliding_window=4096),
    "phi3": _text(3072, 8192, 32, 32, None, 32064, max_position_embeddings=4096),
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072},
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3_vl_text": {**_QWEN2, "head_dim": 128, "max_position_embeddings": 128000},
    "qwen3_5_text": {
        **_text(4096, 12288, 32, 16, 4, 248320, head_dim=256, max_position_embeddings=32768),
        **_DELTA,
    },
    "qwen3_moe": {
        **_text(2048, 6144, 24, 32, 4, 151936, max_position_embeddings=32768),
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, **_SPARSE},
    },
    "qwen3_vl_moe_text": {
        **_text(2048, 5632, 24, 16, 16, 151936, head_dim=128, max_position_embeddings=128000),
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, **_SPARSE},
    },
    "qwen3_5_moe_text": {
        **_text(2048, None, 40, 16, 2, 248320, head_dim=256, max_position_embeddings=32768),
        **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
        **{"shared_expert_intermediate_size": 512, **_DELTA},
    },
    "mllama_text_model": {
        **_text(4096, 14336, 40, 32, 8, 128256, max_position_embeddings=131072),
        **{"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    },
}
"""By model_type of the language model."""

_VIT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3, "image_size": 224}
_SIGLIP = {**_VIT, "intermediate_size": 3072, "patch_size": 16}
_IDEFICS3 = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_QWEN_VIT = {"depth": 32, "num_heads": 16, "in_channels": 3, "patch_size": 14}
_QWEN_VIT |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3_VIT = {**_QWEN_VIT, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
_QWEN3_VIT |= {"num_position_embeddings": 2304}
TOWERS: dict[str, Values] = {
    "clip_vision_model": {**_SIGLIP, "patch_size": 32},
    "siglip_vision_model": _SIGLIP,
    "dinov2": {**_VIT, "mlp_ratio": 4, "patch_size": 14, "use_swiglu_ffn": False},
    "dinov2_with_registers": {**_VIT, "mlp_ratio": 4, "patch_size": 16, "use_swiglu_ffn": False}
    | {"num_register_tokens": 4},
    "internvl_vision": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"image_size": [448, 448], "patch_size": [14, 14], "num_channels": 3},
        **{"attention_bias": False, "use_qk_norm": False, "norm_type": "layer_norm"},
    },
    "idefics2_vision": {**_SIGLIP, "patch_size": 32},
    "idefics3_vision": {**_IDEFICS3, "num_hidden_layers": 12},
    "smolvlm_vision": {**_IDEFICS3, "num_hidden_layers": 12},
    "qwen2_vl_vision": {**_QWEN_VIT, "embed_dim": 1280, "mlp_ratio": 4},
    "qwen2_5_vl_vision": {**_QWEN_VIT, "hidden_size": 3584, "intermediate_size": 3420, "window_size": 112}
    | {"fullatt_block_indexes": [7, 15, 23, 31]},
    "qwen3_vl_vision": {**_QWEN3_VIT, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_vl_moe_vision": {**_QWEN3_VIT, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_5_vision": _QWEN3_VIT,
    "qwen3_5_moe_vision": _QWEN3_VIT,
    "qwen2_audio_encoder": {
        **{"num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120},
        **{"d_model": 1280, "max_source_positions": 1500},
    },
    "mllama_vision_model": {
        **{"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_global_layers": 8},
        **{"attention_heads": 16, "num_channels": 3, "image_size": 448, "patch_size": 14, "max_num_tiles": 4},
        **{"vision_output_dim": 7680},
        **{"supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]},
    },
}
"""By model_type of the tower."""

PARTS: dict[str, tuple[str, str]] = {
    "llava": ("llama", "clip_vision_model"),
    "llava_next": ("llama", "clip_vision_model"),
    "llava_onevision": ("qwen2", "siglip_vision_model"),
    "internvl": ("qwen2", "internvl_vision"),
    "idefics2": ("mistral", "idefics2_vision"),
    "idefics3": ("llama", "idefics3_vision"),
    "smolvlm": ("llama", "smolvlm_vision"),
    "qwen2_vl": ("qwen2_vl_text", "qwen2_vl_vision"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_vision"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_vision"),
    "qwen2_audio": ("qwen2", "qwen2_audio_encoder"),
    "mllama": ("mllama_text_model", "mllama_vision_model"),
}
"""model_types of language model and tower where config.json does not name them, by that of the class."""

_NEXT_GRID = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_SIDES = (384, 768, 1152, 1536, 1920, 2304)
CLASSES: dict[str, Values] = {
    "llava": {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    "llava_next": {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    | {"image_grid_pinpoints": _NEXT_GRID},
    "llava_onevision": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    | {"image_grid_pinpoints": [[a, b] for a in _SIDES for b in _SIDES], "vision_aspect_ratio": "anyres_max_9"},
    "internvl": {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "downsample_ratio": 0.5}
    | {"tie_word_embeddings": True},
    "idefics3": {"scale_factor": 2},
    "smolvlm": {"scale_factor": 2},
}
"""Values of the whole model, by its model_type; tie_word_embeddings is false in the others."""
PERCEIVER = {"resampler_n_latents": 64, "resampler_depth": 3, "resampler_n_heads": 16, "resampler_head_dim": 96}
PERCEIVER |= {"num_key_value_heads": 4}
