"""Complete, tiny, random folders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL (also with experts) and Qwen3.5, each with its own
processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.helpers.tiny_hf import make_tokenizer, randomise

TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %} ASSISTANT:{% else %}{% generation %} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
PATCH = 6
"""Side in pixels; a token is 12 x 12 of them."""
_PATCHES = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 404,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_VISION = {
    "depth": 4,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CALM_EPS = 1e-2
"""Epsilon of the norms in Qwen3.5's language model. With the published 1e-6, the norm after a delta net amplifies the
rounding of values near zero so much that fp32 itself is only good for a relative 1e-4; `test_delta_net.py` compares
that."""
KINDS: dict[str, tuple[Any, Any, Any, Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        {"rope_parameters": ROPE | {"mrope_section": [1, 2, 1]}},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
        {
            "hidden_size": 32,
            "intermediate_size": 52,
            "out_hidden_size": 64,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
        },
        {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        {"head_dim": 16, "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
    ),
    "qwen3_5": (
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 25},
        {
            "head_dim": 16,
            "rms_norm_eps": CALM_EPS,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": ROPE
            | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        },
    ),
}
"""By model_type: config, model, processor, video processor, and what tower and language model have of their own."""
_OF_QWEN3_5 = KINDS["qwen3_5"]
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
KINDS["qwen3_5_moe"] = (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    *_OF_QWEN3_5[2:5],
    _OF_QWEN3_5[5] | _EXPERTS | {"shared_expert_intermediate_size": 64},
)
WITH_EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")
"""Classes of which the tower and the processors are those of another class."""
OWN_TOWERS = tuple(name for name in KINDS if name not in WITH_EXPERTS)


def make_hf_qwen(
    folder: Path,
    name: str,
    *,
    tie: bool = False,
    seed: int = 0,
    vision_overrides: dict[str, Any] | None = None,
    text_overrides: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Write a whole folder of the class `name` (model_type) and return the model."""
    config_class, model_class, processor_class, video_class, vision, text = KINDS[name]
    tokenizer = make_tokenizer(404, named=TOKENS)
    own: dict[str, Any] = {}
    if processor_class is Qwen3VLProcessor:  # the defaults of its two processors differ, in its files they do not
        own = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessor(size={"shortest_edge": 24 * 24, "longest_edge": 96 * 96}, **_PATCHES, **own)
    videos = video_class(size={"shortest_edge": 24 * 24, "longest_edge": 96 * 96 * 8}, **_PATCHES)
    processor = processor_class(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    ids = {key: tokenizer.convert_tokens_to_ids(TOKENS[key]) for key in TOKENS}
    config = config_class(
        vision_config=_VISION | vision | (vision_overrides or {}),
        text_config=_TEXT | text | {"tie_word_embeddings": tie} | (text_overrides or {}),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        tie_word_embeddings=tie,
    )
    model = model_class._from_config(config).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def make_each_kind(root: Path) -> dict[str, Path]:
    """Write a tiny model of each class, and return their folders."""
    for name in KINDS:
        make_hf_qwen(root / name, name, seed=int("qwen3_5" in name))  # of little noise, see CALM_EPS
    return {name: root / name for name in KINDS}
