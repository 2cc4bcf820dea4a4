"""What the ranks of the GPU tests of fully sharded data parallelism run."""

from __future__ import annotations

import gc
from typing import Any

import torch

from tests.gpu.option_checks import BF16
from tests.helpers.batches import PackedLoader
from tests.parallel.checks import join
from tests.parallel.fsdp_checks import DISTRIBUTED, LORA, MODES, sharded
from tests.parallel.training_checks import MIXED, curve, run_config

SMALL_LR = 1e-5
"""With the other tests' rate, losses fall to 0.001 within five steps, and rounding alone changes them by tens of
percents; with this one by 0.4 % (in bf16 on CPUs)."""
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "recompute": {"model.recompute": "full", "model.recompute_vision": "full"},
    "frozen tower": {"model.freeze_vision_model": True},
    "lora": LORA,
}


def curves_and_memory(checkpoint: str, save_dir: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Train every variant in every way, packed; return losses, norms and the most bytes that a run allocated."""
    groups, found = join(1, 1), {}
    for name, flags in VARIANTS.items():
        for kind in ("distributed", *MODES):
            keys = BF16 | flags | (DISTRIBUTED if kind == "distributed" else sharded(kind))
            keys |= {"training.train_iters": 6, "training.micro_batch_size": 2, "optimizer.lr": SMALL_LR}
            run = run_config(1, 1, checkpoint, save_dir, **keys)
            # What earlier runs have left does not count, nor what building the model and the first steps take.
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            losses = curve(groups, run, MIXED, PackedLoader, after_step=start_measuring)
            found[name, kind] = losses | {"peak": torch.cuda.max_memory_allocated() - before}
    return found


def start_measuring(num_steps: int) -> None:
    """Forget the peak of memory so far, while the optimizer's state and all buffers are being created."""
    if num_steps <= 2:
        torch.cuda.reset_peak_memory_stats()
