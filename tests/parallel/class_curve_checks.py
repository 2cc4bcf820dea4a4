"""Training on given conversations inside a test world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_mcore.config.schema import RunConfig
from llava_mcore.data.encoding.assets import load_assets
from llava_mcore.data.samples import Batch, Conversation
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.faults.skipped_samples import SkipBudget
from llava_mcore.training.fetch import fetch_step
from llava_mcore.training.step import train_step
from tests.helpers.class_checks import batch_of
from tests.parallel.checks import join
from tests.parallel.training_checks import make_trainer, run_config


class GivenLoader:
    """Deals one pack for each step."""

    def __init__(self, packs: Sequence[Batch]) -> None:
        self._packs = iter(packs)

    def __next__(self) -> Batch:
        return next(self._packs)


RECOMPUTED = {"model.recompute": "full", "model.recompute_vision": "full"}


def train(tp: int, pp: int, cases: dict[str, dict[str, Any]], save_dir: str) -> dict[str, dict[str, list[float]]]:
    """Train each case's checkpoint on its steps, one pack each, and a few steps of two packs with other options.

    Returns losses, gradient norms and learning rates.
    """
    groups = join(tp, pp)
    found = {}
    for name, case in cases.items():
        found[name] = _steps(groups, run_config(tp, pp, case["checkpoint"], save_dir, **_flags(case, 1)), case, 1)
        flags = _flags(case, 2)
        if tp * pp > 1:
            flags |= {"parallel.sequence_parallel": tp > 1} | RECOMPUTED
            if case["chunk"] and pp > 1:
                flags |= {"parallel.num_layers_per_virtual_pipeline_stage": case["chunk"]}
        found[f"{name}, options"] = _steps(groups, run_config(tp, pp, case["checkpoint"], save_dir, **flags), case, 2)
    return found


def _flags(case: dict[str, Any], packs: int) -> dict[str, Any]:
    return {
        "training.micro_batch_size": 1,
        "training.global_batch_size": packs,
        "training.train_iters": len(case["steps"]) // packs,
    }


def _steps(groups: Groups, run: RunConfig, case: dict[str, Any], packs: int) -> dict[str, list[float]]:
    steps: Sequence[Sequence[Conversation]] = case["steps"]
    trainer = make_trainer(groups, run)
    loader = None
    if groups.loads_data:
        assets = load_assets(Path(case["hf"]))
        loader = GivenLoader([batch_of(assets, conversations, packed=True) for conversations in steps])
    losses, norms, rates = [], [], []
    for _ in range(min(run.training.train_iters, len(steps) if packs == 1 else 4)):
        batches, *_ = fetch_step(groups, loader, packs, SkipBudget(0.0), trainer.fields)
        result = train_step(groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, packs).result()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        rates.append(result.lr)
    return {"loss": losses, "grad_norm": norms, "lr": rates}
