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
from tests.parallel.validation_checks import train_and_validate

DISTRIBUTED: dict[str, Any] = {"parallel.use_distributed_optimizer": True}
MODES = ("optim", "optim_grads", "optim_grads_params")
OF_EVERY_MODE = ("plain", "packed", "lora")
"""Variants of each mode and of several ranks' distributed optimizer; the others are of the mode that divides most."""
OF_ONE_REPLICA = ("frozen tower", "whole towers")
"""Variants in which replicas of shards change nothing: these average what is sharded in any way."""
LORA = {"model.freeze_vision_model": True, "adapter.r": 4, "adapter.vision_r": 2, "adapter.projection_r": 3}
SHORT = {"training.train_iters": 3, "training.micro_batch_size": 2}


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
        "tied": ({}, False),
        "bf16": ({"training.precision": "bf16", "optimizer.vision_lr": 3e-3}, False),
    }


def names_of(kind: str, world_size: int, replicas: int) -> list[str]:
    """Return the variants of a kind of runs, with "validation" if it has one."""
    names = ["plain", "packed", "frozen tower", "whole towers", "lora", "tied", "bf16", "validation"]
    if kind == MODES[-1]:
        return [name for name in names if replicas == 1 or name not in OF_ONE_REPLICA]
    return names if world_size == 1 else list(OF_EVERY_MODE)


def curves(
    tp: int, replicas: int, kinds: list[str], checkpoint: str, tied: str, data: str, save_dir: str
) -> dict[tuple[str, str], Any]:
    """Train every variant with the distributed optimizer or fully sharded, and validate in turns with training.

    Args:
        data: of which replicas validate different numbers of samples.
    """
    groups = join(tp, 1, replicas=replicas)
    runs = {}
    for kind in kinds:
        keys = SHORT | (DISTRIBUTED if kind == "distributed" else sharded(kind, replicas))
        for name, (flags, packed) in variants(groups).items():
            if name not in names_of(kind, groups.world_size, replicas):
                continue
            runs[name, kind] = TrainingRun(tied if name == "tied" else checkpoint, MIXED, keys | flags, packed)
    found: dict[tuple[str, str], Any] = run_all(groups, runs, save_dir)
    validated = {"data.path": data, "data.num_workers": 0, "data.seq_length": 128, "validation.eval_interval": 1}
    for kind in kinds:
        if "validation" not in names_of(kind, groups.world_size, replicas):
            continue
        flags = validated | SHORT | (DISTRIBUTED if kind == "distributed" else sharded(kind, replicas))
        found["validation", kind] = train_and_validate(groups, checkpoint, save_dir, flags, 2)
    return found


def kind_flags(kind: str) -> dict[str, Any]:
    """Return the keys of a run by its kind: distributed, a mode, or a mode with two replicas (optim+2)."""
    mode, _, replicas = kind.partition("+")
    return DISTRIBUTED if kind == "distributed" else sharded(mode, int(replicas or 1))


AXES = {"ep": "parallel.expert_model_parallel_size", "cp": "parallel.context_parallel_size"}


def axes_of(keys: dict[str, Any]) -> dict[str, int]:
    """Return what else divides the model or its samples."""
    return {axis: keys[key] for axis, key in AXES.items() if key in keys}


def configure(
    name: str, kind: str, tp: int, checkpoint: str, save_dir: str, more: dict[str, Any], *, resumes: bool
) -> RunConfig:
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
    return run_config(tp, 1, checkpoint, save_dir, **(flags | kind_flags(kind) | more))


def train_and_save(
    tp: int, kinds: list[str], checkpoint: str, save_dir: str, hf: str, more: dict[str, Any]
) -> dict[str, list[float]]:
    """Train, save, train on; return the losses after the save, for each kind."""
    groups, found = join(tp, 1, **axes_of(more)), {}
    for kind in kinds:
        run = configure(kind, kind, tp, checkpoint, save_dir, more, resumes=False)
        trainer = make_trainer(groups, run)
        loader = open_fake_loader(groups, trainer, run, 0)
        train_steps(groups, trainer, run, loader)
        state = None if loader is None else loader.state()
        save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
        found[kind] = train_steps(groups, trainer, run, loader)
    return found


def resume_and_train(
    tp: int, replicas: int, pairs: list[tuple[str, str]], checkpoint: str, save_dir: str, hf: str, more: dict[str, Any]
) -> dict[tuple[str, str], Any]:
    """Resume runs of `train_and_save`, each as another kind; return the losses from there on.

    Each is saved again as soon as it is loaded: every tensor is the one that was loaded, bit for bit.
    """
    groups, found = join(tp, 1, replicas=replicas, **axes_of(more)), {}
    for saved, kind in pairs:
        run = configure(saved, kind, tp, checkpoint, save_dir, more, resumes=True)
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
