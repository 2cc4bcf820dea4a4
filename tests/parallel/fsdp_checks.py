"""Fully sharded runs inside a test world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.config.schema import RunConfig
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from tests.parallel.checks import join
from tests.parallel.resume_checks import STEPS, open_fake_loader, tensors_in, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, TrainingRun, make_trainer, run_all, run_config

DISTRIBUTED: dict[str, Any] = {"parallel.use_distributed_optimizer": True}
MODES = ("optim", "optim_grads", "optim_grads_params")
LORA = {"model.freeze_vision_model": True, "adapter.r": 4, "adapter.vision_r": 2, "adapter.projection_r": 3}
SHORT = {"training.train_iters": 4, "training.micro_batch_size": 2}


def sharded(mode: str, replicas: int = 1) -> dict[str, Any]:
    """Return the keys of a fully sharded run."""
    return {"parallel.fsdp": mode, "parallel.hsdp_replicas": replicas}


def variants(groups: Groups) -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the flags of runs that are compared, and whether they are packed."""
    sequence = {"parallel.sequence_parallel": True} if groups.tp_size > 1 else {}
    whole = {"parallel.vision_data_parallel": True} if groups.tp_size > 1 else {}
    return {
        "plain": ({"training.micro_batch_size": 1}, False),  # several micro-batches a step
        "packed": (sequence, True),
        "frozen tower": ({"model.freeze_vision_model": True, "model.recompute": "full"}, False),
        "whole towers": (whole | {"model.recompute_vision": "full"}, False),
        "lora": (LORA | sequence, False),
        "bf16": ({"training.precision": "bf16", "optimizer.vision_lr": 3e-3}, False),
    }


def curves(tp: int, replicas: int, checkpoint: str, save_dir: str, modes: list[str]) -> dict[str, Any]:
    """Train every variant with the distributed optimizer and fully sharded."""
    groups = join(tp, 1, replicas=replicas)
    found = {}
    for name, (flags, packed) in variants(groups).items():
        kinds = {"distributed": DISTRIBUTED} if replicas == 1 else {}
        kinds |= {mode: sharded(mode, replicas) for mode in modes}
        runs = {(name, kind): TrainingRun(checkpoint, MIXED, SHORT | flags | x, packed) for kind, x in kinds.items()}
        found |= run_all(groups, runs, save_dir)
    return found


def kind_flags(kind: str) -> dict[str, Any]:
    """Return the keys of a run by its kind: distributed, a mode, or a mode with two replicas (optim+2)."""
    mode, _, replicas = kind.partition("+")
    return DISTRIBUTED if kind == "distributed" else sharded(mode, int(replicas or 1))


def configure(name: str, kind: str, tp: int, checkpoint: str, save_dir: str, *, resumes: bool, lora: bool) -> RunConfig:
    """Return a run that saves; `name`: of its folder."""
    flags: dict[str, Any] = {
        "name": name,
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
        "checkpoint.load_optim": resumes,
        "optimizer.vision_lr": 2e-3,
        "optimizer.min_lr": 1e-4,
        "training.micro_batch_size": 2,
    }
    return run_config(tp, 1, checkpoint, save_dir, **flags, **kind_flags(kind), **(LORA if lora else {}))


def train_and_save(
    tp: int, kinds: list[str], checkpoint: str, save_dir: str, hf: str, lora: bool = False
) -> dict[str, list[float]]:
    """Train, save, train on; return the losses after the save, for each kind."""
    groups, found = join(tp, 1), {}
    for kind in kinds:
        run = configure(kind, kind, tp, checkpoint, save_dir, resumes=False, lora=lora)
        trainer = make_trainer(groups, run)
        loader = open_fake_loader(groups, trainer, run, 0)
        train_steps(groups, trainer, run, loader)
        state = None if loader is None else loader.state()
        save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
        found[kind] = train_steps(groups, trainer, run, loader)
    return found


def resume_and_train(
    tp: int, replicas: int, pairs: list[tuple[str, str]], checkpoint: str, save_dir: str, hf: str, lora: bool = False
) -> dict[tuple[str, str], Any]:
    """Resume runs of `train_and_save`, each as another kind; return the losses from there on.

    Each is saved again as soon as it is loaded: every tensor is the one that was loaded, bit for bit.
    """
    groups, found = join(tp, 1, replicas=replicas), {}
    for saved, kind in pairs:
        run = configure(saved, kind, tp, checkpoint, save_dir, resumes=True, lora=lora)
        trainer = make_trainer(groups, run)
        progress, states = resume(trainer)
        assert progress.iteration == STEPS and (states is not None) == groups.loads_data
        again = replace_name_of(trainer, f"{saved}-as-{kind}-tp{tp}-of-{groups.world_size}")
        loader = open_fake_loader(groups, trainer, run, STEPS)
        state = None if loader is None else loader.state()
        copied = save_checkpoint(again, progress, Path(hf), state)
        before, after = tensors_in(latest_checkpoint(run.run_dir)[0]), tensors_in(copied)
        assert before.keys() == after.keys()
        assert not [name for name, x in before.items() if not torch.equal(x, after[name])]
        found[saved, kind] = train_steps(groups, trainer, run, loader)
    return found


def replace_name_of(trainer: Trainer, name: str) -> Trainer:
    """Return the trainer under the name of another run."""
    return replace(trainer, run=trainer.run.model_copy(update={"name": name}))
