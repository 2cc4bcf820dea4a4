"""Fully sharded data parallelism on two GPUs: the distributed optimizer's losses, in less memory, resumed exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.import_hf import import_hf
from tests.gpu import fsdp_checks
from tests.gpu.fsdp_checks import SMALL_LR
from tests.gpu.option_checks import BF16
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel.fsdp_checks import MODES, resume_and_train, train_and_save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="shards are on two GPUs or more"),
]
WHOLE = "optim_grads_params"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights take more than its activations."""
    root: Path = tmp_path_factory.mktemp("fsdp")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    make_hf_llava(root / "hf", text_overrides=sizes)
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


def test_losses_and_memory(checkpoint: Path, tmp_path: Path) -> None:
    ranks = run_world(2, fsdp_checks.curves_and_memory, checkpoint=str(checkpoint), save_dir=str(tmp_path))
    found: dict[tuple[str, str], Any] = ranks[0]
    for (variant, kind), run in found.items():
        plain = found[variant, "distributed"]
        worst = max(abs(a - b) / b for a, b in zip(run["loss"], plain["loss"], strict=True))
        print(variant, kind, f"worst relative loss difference {worst:.1e}, peak {run['peak'] / 2**20:.0f} MiB")
        assert all(map(math.isfinite, run["loss"] + run["grad_norm"])), (variant, kind)
        assert worst < 0.01, (variant, kind)
        assert run["grad_norm"][0] == pytest.approx(plain["grad_norm"][0], rel=0.01)
    peaks = {key: run["peak"] for key, run in found.items()}
    assert peaks["all", WHOLE] < peaks["all", "distributed"]
    assert peaks["lora", WHOLE] < peaks["lora", "distributed"], "frozen weights are divided too"


def test_resumed_by_the_other_kind(checkpoint: Path, tmp_path: Path) -> None:
    """Bit for bit as the same kind; as the other one with the same tensors, and losses within bf16's rounding."""
    hf = str(hf_folder(iteration_folder(checkpoint, 0)))
    model = {
        "checkpoint": str(checkpoint),
        "hf": hf,
        "save_dir": str(tmp_path),
        "more": BF16 | {"optimizer.lr": SMALL_LR, "optimizer.vision_lr": 2 * SMALL_LR, "optimizer.min_lr": 0.0},
    }
    expected = run_world(2, train_and_save, tp=1, kinds=["distributed", *MODES], **model)[0]
    pairs = [(kind, kind) for kind in MODES] + [(WHOLE, "distributed"), ("distributed", WHOLE)]
    found = run_world(2, resume_and_train, tp=1, replicas=1, pairs=pairs, **model)[0]
    for (saved, kind), losses in found.items():
        assert losses == (expected[saved] if saved == kind else pytest.approx(expected[saved], rel=0.01)), (saved, kind)
