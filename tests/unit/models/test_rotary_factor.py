"""Rotary embeddings with a factor (YaRN): what is left of it where Transformer Engine's kernel knows none."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import math
from pathlib import Path

import pytest
import torch

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.language.shape import Rope
from llava_mcore.parallel.groups import single_process
from tests.helpers.cases import YARN, Case, hf_logits, make_inputs, make_sharp_case
from tests.parallel.checks import load_model, logits


def test_nothing_is_fused_that_the_kernel_would_drop() -> None:
    assert Rope(torch.ones(8), 1.0).fusion_fields(16) == {"apply_rope_fusion": True}
    assert Rope(torch.ones(4), 1.0).fusion_fields(16) == {"apply_rope_fusion": True}, "parts of heads are no matter"
    whole = Rope(torch.ones(8), 1.5).fusion_fields(16)
    assert whole == {"apply_rope_fusion": True, "softmax_scale": pytest.approx(1.5**2 / math.sqrt(16))}
    assert Rope(torch.ones(4), 1.5).fusion_fields(16) == {"apply_rope_fusion": False}


def test_the_softmax_may_carry_the_factor(tmp_path: Path) -> None:
    """As the fused kernel has it, on layers without it: Hugging Face's logits, and others if the factor is left out."""
    model = make_sharp_case(Case("clip", "qwen2", {"text_overrides": {"rope_parameters": YARN}}), tmp_path / "hf")
    inputs = make_inputs(model)
    expected = hf_logits(model, inputs)
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "megatron")
    with single_process() as groups:
        ours = load_model(groups, checkpoint)
        rope = ours.language_model.shape.rope
        assert rope.scaling != 1.0
        scale = rope.fusion_fields(ours.config.kv_channels)["softmax_scale"]
        found = {}
        for name, factor in (("in the softmax", scale), ("left out", ours.config.kv_channels**-0.5)):
            for layer in ours.language_model.decoder.layers:
                layer.self_attention.factor = rope.factor(is_fused=True)
                layer.self_attention.core_attention.scale = factor
            out = logits(groups, ours, inputs)
            assert out is not None
            found[name] = ((out - expected).abs().max() / expected.abs().max()).item()
    assert found["in the softmax"] <= 2e-5  # rounded once more than where cosines and sines are scaled
    assert found["left out"] > 1e-2
