"""Rotary angles by positions of time, height and width are Hugging Face's, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from llava_mcore.models.language.decoder import TokenRope
from llava_mcore.models.language.shape import mrope_from_hf
from llava_mcore.models.rotary import Rotation, rotate
from tests.helpers.cases import LINEAR, LLAMA3_ROPE, YARN
from tests.helpers.tiny_qwen import KINDS, ROPE


@pytest.mark.parametrize(
    ("rotary", "config"),
    [
        (Qwen2_5_VLRotaryEmbedding, ROPE | {"mrope_section": [1, 1, 2]}),
        (Qwen2_5_VLRotaryEmbedding, ROPE | {"mrope_section": [2, 1, 1], "rope_type": "yarn", "factor": 4.0}),
        (Qwen2_5_VLRotaryEmbedding, LINEAR | {"mrope_section": [1, 1, 2]}),
        (Qwen2_5_VLRotaryEmbedding, LLAMA3_ROPE | {"mrope_section": [1, 2, 1]}),
        (Qwen3VLTextRotaryEmbedding, ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}),
        (Qwen3VLTextRotaryEmbedding, YARN | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}),
        (Qwen3VLTextRotaryEmbedding, LLAMA3_ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}),
    ],
)
def test_angles_are_hugging_faces(rotary: Any, config: dict[str, Any]) -> None:
    kind = "qwen3_vl" if rotary is Qwen3VLTextRotaryEmbedding else "qwen2_5_vl"
    hf = KINDS[kind][0]().text_config.__class__(
        hidden_size=64,
        num_attention_heads=8,
        head_dim=8,
        rope_parameters=config | {"original_max_position_embeddings": 64} if config["rope_type"] == "yarn" else config,
    )
    rope = mrope_from_hf(hf, rotary)
    assert rope.axes is not None
    positions = torch.randint(0, 90, (3, 2, 17))
    cos, sin = rotary(hf)(torch.zeros(1), positions)
    q, k = torch.randn(17, 2, 4, 8), torch.randn(17, 2, 4, 8)
    theirs = apply_rotary_pos_emb(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
    angles = TokenRope(rope.inv_freq, rope.axes)(positions)
    for x, expected in zip((q, k), theirs, strict=True):
        assert torch.allclose(rotate(x, Rotation(angles), factor=rope.scaling), expected.permute(2, 0, 1, 3), atol=1e-6)
