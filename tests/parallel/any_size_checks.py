"""Training on images and videos of several sizes inside a test world."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from pathlib import Path
from typing import Any

import torch

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.encoding import assets_once
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

STEPS = 3
SEQ_LENGTH = 192
MICRO_BATCH = 4
SAVED_AFTER, MORE_STEPS = 2, 2
"""The first loss after a checkpoint shows its weights; the second, and the weights after it, moments and rates."""

Case = dict[str, str]
Curve = dict[str, list[float]]


def train(tp: int, pp: int, cases: dict[str, Case], save_dir: str) -> dict[str, Curve]:
    """Train on every case's checkpoint, packed; one process also trains padded.

    Returns losses, gradient norms and sizes of batches.
    """
    groups = join(tp, pp)
    found = {}
    for name, case in cases.items():
        for packing in (False, True) if tp * pp == 1 else (True,):
            flags = {"parallel.sequence_parallel": True} if tp > 1 and packing else {}
            trainer = make_trainer(groups, run_config(tp, pp, case["checkpoint"], save_dir, **flags))
            loader = open_loader(groups, case, packing=packing)
            found[f"{name}, packed" if packing else name] = train_steps(groups, trainer, loader, STEPS)
    return found


def stop_and_resume(tp: int, pp: int, cases: dict[str, Case], save_dir: str) -> dict[str, dict[str, Any]]:
    """Train every case and save on the way; a new trainer continues from the checkpoint, too.

    Returns both curves, the parameters that differ after them, and those that the last steps left as they were.
    """
    groups = join(tp, pp)
    return {name: _stopped(groups, name, case, save_dir) for name, case in cases.items()}


def _stopped(groups: Groups, name: str, case: Case, save_dir: str) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "name": name,
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
        "checkpoint.load_optim": True,
        "parallel.use_distributed_optimizer": True,
    }
    run = run_config(groups.tp_size, groups.pp_size, case["checkpoint"], save_dir, **flags)
    first, loader = make_trainer(groups, run), open_loader(groups, case)
    begun = train_steps(groups, first, loader, SAVED_AFTER)
    state = None if loader is None else loader.state()
    save_checkpoint(first, TrainingProgress(SAVED_AFTER, SAVED_AFTER * GLOBAL_BATCH), Path(case["hf"]), state)
    at_the_stop = {key: x.clone() for key, x in weights(first).items()}
    uninterrupted_later = train_steps(groups, first, loader, MORE_STEPS)

    second = make_trainer(groups, run)
    progress, states = resume(second)
    assert progress.iteration == SAVED_AFTER
    later = train_steps(groups, second, open_loader(groups, case, saved=states), MORE_STEPS)
    resumed, uninterrupted = weights(second), weights(first)
    assert resumed.keys() == uninterrupted.keys()
    return {
        "expected": {key: begun[key] + uninterrupted_later[key] for key in begun},
        "found": {key: begun[key] + later[key] for key in begun},
        "different": [key for key, x in uninterrupted.items() if not torch.equal(x, resumed[key])],
        "unchanged": [key for key, x in at_the_stop.items() if torch.equal(x, resumed[key]) and x.any()],
    }


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return this rank's parameters."""
    return {f"{i}.{name}": x.detach() for i, model in enumerate(trainer.models) for name, x in model.named_parameters()}


def open_loader(groups: Groups, case: Case, *, packing: bool = True, saved: Any = None) -> TrainLoader | None:
    """Return the loader of a case's data on ranks that load data. `saved`: the states that it continues from."""
    if not groups.loads_data:
        return None
    config = DataConfig(
        path=Path(case["data"]),
        seq_length=SEQ_LENGTH,
        num_workers=0,
        num_streams=groups.dp_size,
        packing=packing,
        packing_buffer_size=6,
    )
    where = {"dp_rank": groups.dp_rank, "dp_size": groups.dp_size}
    assets = assets_once(Path(case["hf"]))
    return TrainLoader(config, assets, micro_batch_size=MICRO_BATCH, seed=3, saved=saved, **where)


def train_steps(groups: Groups, trainer: Trainer, loader: TrainLoader | None, number: int) -> Curve:
    """Train so many steps; return losses, gradient norms and sizes of batches."""
    curve: Curve = {"loss": [], "grad_norm": [], "tokens": [], "tiles": []}
    num_batches = GLOBAL_BATCH // (MICRO_BATCH * groups.dp_size)
    for _ in range(number):
        batches, counts, *_ = fetch_step(groups, loader, num_batches, SkipBudget(0.0), trainer.fields)
        result = train_step(
            groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH
        ).result()
        curve["loss"].append(result.loss)
        curve["grad_norm"].append(result.grad_norm)
        curve["tokens"].append(counts.num_tokens)
        curve["tiles"].append(counts.num_tiles + counts.num_patches)
    return curve
