"""Context parallelism with Transformer Engine's attention: the losses and gradients of one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.convert.import_hf import import_hf
from tests.gpu import context_checks
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.helpers.world import run_world
from tests.parallel.tiny_models import OF_PICTURES, OF_QWEN

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Heads of a size that the kernels of divided attention take, and as many as four ranks divide."""
LAYOUTS = [x for x in [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)] if x[0] * x[1] * x[2] <= NUM_GPUS]
"""tp, cp, pp."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A class with tiles and one with M-RoPE."""
    root = tmp_path_factory.mktemp("context")
    make_hf_llava(root / "llava", text_overrides=WIDE | {"head_dim": 64})
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    of_tower = {"out_hidden_size": WIDE["hidden_size"]}
    make_hf_qwen(
        root / "qwen2_5_vl", "qwen2_5_vl", text_overrides=WIDE | {"rope_parameters": rope}, vision_overrides=of_tower
    )
    found = {}
    for name, conversations in (("llava", OF_PICTURES), ("qwen2_5_vl", OF_QWEN)):
        import_hf(root / name, root / f"{name}-megatron")
        found[name] = {
            "hf": str(root / name),
            "checkpoint": str(root / f"{name}-megatron"),
            "all": conversations,
            "single": conversations[2:],
            "text": conversations[1:2],
        }
    return found


@pytest.fixture(scope="module")
def one_gpu(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one GPU computes."""
    save_dir = str(tmp_path_factory.mktemp("one"))
    found: dict[str, Any] = run_world(1, context_checks.losses, layout=(1, 1, 1), cases=cases, save_dir=save_dir)[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_gpu(
    cases: dict[str, dict[str, Any]], one_gpu: dict[str, Any], tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    """With every way to exchange tokens, packed, in bf16, whose rounding a wrong token or mask exceeds by far."""
    size = layout[0] * layout[1] * layout[2]
    ranks = run_world(size, context_checks.losses, layout=layout, cases=cases, save_dir=str(tmp_path))
    for key in ranks[0]:
        expected = one_gpu[(key[0], None) if key[1] == "a2a+p2p" else key]
        for rank in ranks:
            assert rank[key]["loss"] == pytest.approx(expected["loss"], rel=3e-3), (layout, key)
            assert rank[key]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=3e-2), (layout, key)
        print(f"{layout} {key}: {ranks[0][key]} instead of {expected}")
