"""Qwen's special tokens. Ranks of products import this file, which must not import megatron.core."""

from __future__ import annotations

FIRST_SPECIAL = 151643
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
"""From id FIRST_SPECIAL on, as in Qwen2.5-VL and Qwen3-VL."""
PAD, PAD_ID = SPECIAL[0], FIRST_SPECIAL
