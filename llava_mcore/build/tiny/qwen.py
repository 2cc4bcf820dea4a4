"""Tiny folders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with and without experts, and Qwen2-Audio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf

from llava_mcore.build.tiny.parts import PATCH, chat_template, make_tokenizer, text_values, write
from llava_mcore.models.architectures.registry import architecture_of

_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_AUDIO_TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 52,
        "out_hidden_size": 64,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
    "qwen3_5": {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 25},
}
_TOWERS |= {"qwen3_vl_moe": _TOWERS["qwen3_vl"], "qwen3_5_moe": _TOWERS["qwen3_5"]}
_ROPES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"mrope_section": [1, 2, 1]},
    "qwen2_5_vl": {"mrope_section": [1, 1, 2]},
    "qwen3_vl": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "qwen3_5": {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
_ROPES |= {"qwen3_vl_moe": _ROPES["qwen3_vl"], "qwen3_5_moe": _ROPES["qwen3_5"]}
"""Settings of the rotary positions that differ between the classes."""
_TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 16},
    "qwen3_5": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_TEXTS |= {
    "qwen3_vl_moe": _TEXTS["qwen3_vl"] | _EXPERTS,
    "qwen3_5_moe": _TEXTS["qwen3_5"] | _EXPERTS | {"shared_expert_intermediate_size": 96},
}
"""Other fields that only their language models have."""
_NEW = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Classes with Qwen3-VL's processors."""


def write_qwen_vl(name: str, folder: Path, seed: int) -> None:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5; a token is 28 x 28 pixels."""
    tokenizer = make_tokenizer(_TOKENS)
    patches = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    min_pixels, max_pixels = (4 * PATCH) ** 2, (8 * PATCH) ** 2
    # The defaults of Qwen3-VL's two processors differ; in published files they do not.
    means: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if name in _NEW else {}
    images = hf.Qwen2VLImageProcessor(
        size={"shortest_edge": min_pixels, "longest_edge": max_pixels}, **patches, **means
    )
    video_class = hf.Qwen3VLVideoProcessor if name in _NEW else hf.Qwen2VLVideoProcessor
    videos = video_class(size={"shortest_edge": min_pixels, "longest_edge": 8 * max_pixels}, **patches)
    processors = {
        "qwen2_vl": hf.Qwen2VLProcessor,
        "qwen2_5_vl": hf.Qwen2_5_VLProcessor,
        **dict.fromkeys(_NEW, hf.Qwen3VLProcessor),
    }
    marks = {kind: f"<|vision_start|>{_TOKENS[f'{kind}_token']}<|vision_end|>" for kind in ("image", "video")}
    processor = processors[name](images, tokenizer, videos, chat_template=chat_template(marks))
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in _TOKENS.items()}
    tower = {
        "depth": 4,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    text = text_values(tokenizer) | _TEXTS.get(name, {})
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **_ROPES[name]}
    config = hf.CONFIG_MAPPING[name](
        vision_config=tower | _TOWERS[name],
        text_config=text,
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        tie_word_embeddings=False,
    )
    write(architecture_of(config).model_class, config, processor, folder, seed)


def write_qwen2_audio(name: str, folder: Path, seed: int) -> None:
    """Whisper's encoder for clips of up to 30 seconds, and Qwen2."""
    tokenizer = make_tokenizer(_AUDIO_TOKENS)
    marks = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>\n"}
    extractor = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=30)
    processor = hf.Qwen2AudioProcessor(extractor, tokenizer, chat_template=chat_template(marks))
    config = hf.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 1500,
        },
        text_config={"model_type": "qwen2", **text_values(tokenizer)},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    write(architecture_of(config).model_class, config, processor, folder, seed)
