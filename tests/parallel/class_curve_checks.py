"""Training on given conversations inside a test world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_mcore.config.schema import RunConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.samples import Batch, Conversation
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
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


def train(
    tp: int, pp: int, cases: dict[str, dict[str, Any]], save_dir: str, most_steps: int
) -> dict[str, dict[str, list[float]]]:
    """Train each case's checkpoint on its steps, one pack each, and a few steps of two packs with other options.

    `most_steps`: how many of the former, at most.

    The latter also padded, where each conversation is a row. With data parallelism each rank has one of the two.

    Returns losses, gradient norms and learning rates.
    """
    groups = join(tp, pp)
    found = {}
    for name, case in cases.items():
        options: dict[str, Any] = {}
        if tp * pp > 1:
            options = {"parallel.sequence_parallel": tp > 1} | RECOMPUTED
            if case["chunk"] and pp > 1:
                options |= {"parallel.num_layers_per_virtual_pipeline_stage": case["chunk"]}
        ways: dict[str, tuple[dict[str, Any], int, bool]] = {
            f"{name}, options": (options, 2, True),
            f"{name}, padded": (options | {"model.recompute": "selective"}, 2, False),
        }
        if groups.dp_size == 1:
            ways[name] = ({}, 1, True)
        for way, (flags, batches, packed) in ways.items():
            run = run_config(tp, pp, case["checkpoint"], save_dir, **_flags(case, batches, packed=packed) | flags)
            found[way] = _steps(groups, run, case, batches, most_steps, packed=packed)
    return found


def _flags(case: dict[str, Any], batches: int, *, packed: bool) -> dict[str, Any]:
    size = 1 if packed else len(case["steps"][0])
    return {
        "training.micro_batch_size": size,
        "training.global_batch_size": batches * size,
        "training.train_iters": len(case["steps"]) // batches,
    }


def _steps(
    groups: Groups, run: RunConfig, case: dict[str, Any], num: int, most_steps: int, *, packed: bool
) -> dict[str, list[float]]:
    """Train on steps of `num` micro-batches."""
    steps: Sequence[Sequence[Conversation]] = case["steps"]
    trainer = make_trainer(groups, run)
    loader = None
    if groups.loads_data:
        assets = load_assets(Path(case["hf"]))
        # Encoding them takes about as long as training on them.
        own = steps[: most_steps if num == 1 else 4 * num][groups.dp_rank :: groups.dp_size]
        loader = GivenLoader([batch_of(assets, conversations, packed=packed) for conversations in own])
    losses, norms, rates = [], [], []
    size = run.training.global_batch_size
    for _ in range(min(run.training.train_iters, most_steps if num == 1 else 4)):
        batches, *_ = fetch_step(groups, loader, num // groups.dp_size, SkipBudget(0.0), trainer.fields)
        result = train_step(groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, size).result()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        rates.append(result.lr)
    return {"loss": losses, "grad_norm": norms, "lr": rates}
