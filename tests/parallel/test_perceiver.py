"""Idefics2's connector computes what transformers' does: outputs and gradients, over one rank and two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Idefics2Config
from transformers.models.idefics2.modeling_idefics2 import Idefics2Connector

from llava_mcore.errors import ConversionError
from llava_mcore.models.connectors.perceiver import Perceiver
from tests.helpers.tiny_hf import randomise
from tests.helpers.world import run_world
from tests.parallel.perceiver_checks import entries

CONFIG: dict[str, Any] = {
    "vision_config": {"hidden_size": 48, "image_size": 56, "patch_size": 14, "num_attention_heads": 4},
    "text_config": {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "hidden_act": "silu"},
    "perceiver_config": {
        "hidden_size": 64,
        "resampler_n_latents": 6,
        "resampler_depth": 2,
        "resampler_n_heads": 4,
        "resampler_head_dim": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
    },
}
PATCHES = 16


@pytest.mark.parametrize("tp", [1, 2])
def test_outputs_and_gradients_are_those_of_transformers(tp: int) -> None:
    hf = Idefics2Config(**CONFIG)
    model = Idefics2Connector(hf)
    randomise(model)
    features = torch.randn(3, PATCHES, 48, generator=torch.Generator().manual_seed(1))
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    ranks = run_world(
        tp, "tests.parallel.perceiver_checks:connector", tp=tp, config=CONFIG, tensors=tensors, features=features
    )
    known = {name for entry in entries(hf).values() for name in entry.hf_names}
    assert known == tensors.keys()
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _i, out, key=name: outputs.update({key: out}))
    given = features.clone().requires_grad_()
    expected = model(given, torch.ones(3, PATCHES, dtype=torch.bool))
    expected.square().sum().backward()
    scale = expected.abs().max()
    for rank in ranks:
        assert (rank["out"] - expected).abs().max() <= 1e-5 * scale
        torch.testing.assert_close(rank["features"], given.grad, rtol=1e-4, atol=1e-4)
    for name, entry in entries(hf).items():
        full = entry.shard.join([rank["gradients"][name] for rank in ranks])
        for hf_name, gradient in entry.to_hf(full).items():
            torch.testing.assert_close(gradient, model.get_parameter(hf_name).grad, rtol=1e-4, atol=1e-4)
    for name, mine in ranks[0]["outputs"].items():
        x = outputs[name][0] if isinstance(outputs[name], tuple) else outputs[name]
        torch.testing.assert_close(mine, x[..., : mine.shape[-1]], rtol=1e-4, atol=1e-4)
    assert len(ranks[0]["outputs"]) == 2 + 2 * 8


def test_torch_counts_the_same_products() -> None:
    """But for those of scores, which have no weights."""
    hf = Idefics2Config(**CONFIG, attn_implementation="eager")
    model = Idefics2Connector(hf)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, PATCHES, 48), torch.ones(1, PATCHES, dtype=torch.bool))
    scores = 2 * (2 * 2 * 6 * (PATCHES + 6) * 4 * 24)
    found = Perceiver().products(hf, input_size=48, num_features=PATCHES)
    assert counter.get_total_flops() - scores == sum(found)
    assert Perceiver().num_features(hf, PATCHES) == 6


def test_heads_must_divide() -> None:
    hf = Idefics2Config(**CONFIG)
    hf.perceiver_config.num_key_value_heads = 3
    with pytest.raises(ConversionError, match="resampler_n_heads 4 a multiple of num_key_value_heads 3"):
        Perceiver().config_from_hf(hf)
