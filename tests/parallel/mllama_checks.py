"""Training of Mllama inside a test world."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from typing import Any

from tests.parallel.any_size_checks import STEPS, Case, Curve, open_loader, stop_and_resume, train_steps
from tests.parallel.checks import join
from tests.parallel.training_checks import make_trainer, run_config

FLAGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {},
    "recomputed": {"model.recompute": "full", "model.recompute_vision": "full"},
    "LoRA": {"adapter.r": 4, "adapter.vision_r": 4, "adapter.projection_r": 4, "adapter.targets": "all-linear"},
}
DIVIDED: dict[str, dict[str, Any]] = {
    "tokens divided": {"parallel.sequence_parallel": True},
    "tokens divided, LoRA": FLAGS["LoRA"] | {"parallel.sequence_parallel": True},
    "images divided": {"parallel.vision_data_parallel": True},
}
"""At tp 2 alone; every one computes what `packed` does, or LoRA."""


def train(tp: int, case: Case, save_dir: str) -> dict[str, Curve]:
    """Return losses, gradient norms and sizes of batches of every run."""
    groups, curves = join(tp, 1), {}
    for name, flags in (FLAGS | (DIVIDED if tp > 1 else {})).items():
        trainer = make_trainer(groups, run_config(tp, 1, case["checkpoint"], save_dir, **flags))
        curves[name] = train_steps(groups, trainer, open_loader(groups, case, packing=name != "padded"), STEPS)
    return curves


def resume(tp: int, case: Case, save_dir: str) -> dict[str, Any]:
    """Return both curves of a run with a stop and one without, and what differs after them."""
    return stop_and_resume(tp, 1, {"mllama": case}, save_dir)["mllama"]
