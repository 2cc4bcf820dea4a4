"""Runs with whole towers on every tensor-parallel rank, inside a test world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.config.schema import RunConfig
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.step import train_step
from tests.parallel.checks import join
from tests.parallel.gradient_checks import open_loader, step_gradients
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, TrainingRun, make_trainer, run_all, run_config

CURVE_STEPS = 8
WHOLE = {"parallel.vision_data_parallel": True}
SEQUENCE = {"parallel.sequence_parallel": True}
RECOMPUTED = {"model.recompute": "full", "model.recompute_vision": "full"}
INTERLEAVED = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
DISTRIBUTED = {"parallel.use_distributed_optimizer": True}
STAGE_1 = {"model.freeze_language_model": True, "model.freeze_vision_model": True}
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {"padded": (False, WHOLE), "packed": (True, WHOLE | SEQUENCE)}
LORA = {"model.freeze_vision_model": True, "adapter.r": 4, "adapter.vision_r": 2, "adapter.projection_r": 3}


def gradients(tp: int, pp: int, cases: dict[str, dict[str, Any]], save_dir: str) -> dict[str, Any]:
    """Return losses, gradients and their norm after the backward passes of one step, of each case and variant.

    A step has a micro-batch of all conversations, one of a single image, which some rank has no part of, and one of
    text alone.
    """
    groups = join(tp, pp)
    found = {}
    for name, case in cases.items():
        for variant, (packed, flags) in VARIANTS.items():
            flags = flags if tp > 1 else {}
            run = run_config(tp, pp, case["checkpoint"], save_dir, **_batch_sizes(3), **flags)
            found[name, variant] = step_gradients(groups, run, case, packed=packed)
    return found


def _batch_sizes(packs: int) -> dict[str, Any]:
    return {"training.micro_batch_size": 1, "training.global_batch_size": packs}


def curves(tp: int, pp: int, cases: dict[str, dict[str, Any]], llava: str, save_dir: str) -> dict[str, Any]:
    """Train CURVE_STEPS steps of two packs of each case (none with several replicas), and LLaVA with other options."""
    groups = join(tp, pp)
    whole = WHOLE if tp > 1 else {}
    found = {}
    for name, case in cases.items():
        run = run_config(tp, pp, case["checkpoint"], save_dir, **_batch_sizes(2), **whole)
        found[name] = _curve(groups, run, case)
    short, long = {"training.train_iters": 4}, {"training.train_iters": CURVE_STEPS}
    packed: dict[str, dict[str, Any]] = {
        "packed": SEQUENCE | DISTRIBUTED | long,
        "packed, DoRA": LORA | short | SEQUENCE | {"adapter.dora": True},
    }
    padded: dict[str, dict[str, Any]] = {
        "plain": long,
        "recomputed": RECOMPUTED | short,
        "stage 1": STAGE_1 | short,
        "frozen tower": {"model.freeze_vision_model": True} | short,
        "adapters": LORA | short,
        "interleaved": (INTERLEAVED if pp > 1 else {}) | short,
        "bf16": {"training.precision": "bf16"} | short,
    }
    kept = {name: flags if tp > 1 else _without_tp(flags) for name, flags in (padded | packed).items()}
    runs = {name: TrainingRun(llava, MIXED, flags | whole, name in packed) for name, flags in kept.items()}
    return found | run_all(groups, runs, save_dir)


def _without_tp(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if key not in SEQUENCE}


def _curve(groups: Groups, run: RunConfig, case: dict[str, Any]) -> dict[str, list[float]]:
    trainer = make_trainer(groups, run)
    packs = [case["all"], case["single"]] * CURVE_STEPS
    loader = open_loader(groups, case, packs, packed=True)
    losses, norms = [], []
    for _ in range(CURVE_STEPS):
        batches, *_ = fetch_step(groups, loader, 2, SkipBudget(0.0), trainer.fields)
        result = train_step(groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, 2).result()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"loss": losses, "grad_norm": norms}


def with_dropout(tp: int, pp: int, case: dict[str, Any], save_dir: str) -> dict[str, Any]:
    """Train adapters with dropout for a step; return the random state, and what all ranks should have alike."""
    groups = join(tp, pp)
    flags = {"adapter.dropout": 0.5, **LORA, **WHOLE}
    trainer = make_trainer(groups, run_config(tp, pp, case["checkpoint"], save_dir, **_batch_sizes(1), **flags))
    loader = open_loader(groups, case, [case["all"]], packed=True)
    batches, *_ = fetch_step(groups, loader, 1, SkipBudget(0.0), trainer.fields)
    train_step(groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, 1).result()
    named = [pair for model in trainer.models for pair in model.named_parameters() if pair[1].requires_grad]
    alike = {name: p.detach() for name, p in named if not vars(p)["tensor_model_parallel"]}
    return {"random": torch.get_rng_state(), "alike": alike}


def switch(tp: int, pp: int, checkpoint: str, save_dir: str) -> dict[str, tuple[list[float], list[float]]]:
    """Save with whole towers and resume without, and the other way; return losses and an uninterrupted run's."""
    groups = join(tp, pp)
    found = {}
    for kind, (before, after) in {"whole, divided": (WHOLE, {}), "divided, whole": ({}, WHOLE)}.items():
        for optimizer, common in (("plain", {}), ("distributed", DISTRIBUTED)):
            name = f"{kind}, {optimizer}"
            saving = {"checkpoint.save": True, "checkpoint.save_optim": True} | common
            first = run_config(tp, pp, checkpoint, save_dir, name=name, **saving, **before)
            trainer = make_trainer(groups, first)
            loader = open_fake_loader(groups, trainer, first, 0)
            train_steps(groups, trainer, first, loader)
            hf = hf_folder(latest_checkpoint(Path(checkpoint))[0])
            save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), hf, None)
            uninterrupted = train_steps(groups, trainer, first, loader)
            flags = saving | after | {"checkpoint.load_optim": True}
            second = run_config(tp, pp, checkpoint, save_dir, name=name, **flags)
            again = make_trainer(groups, second)
            resume(again)
            found[name] = (
                train_steps(groups, again, second, open_fake_loader(groups, again, second, STEPS)),
                uninterrupted,
            )
    return found


def save_unchanged(tp: int, pp: int, checkpoints: dict[str, str], save_dir: str) -> None:
    """Load imports into whole towers and save them again."""
    groups = join(tp, pp)
    for name, checkpoint in checkpoints.items():
        flags = {"name": name, "checkpoint.save": True} | WHOLE | SEQUENCE
        trainer = make_trainer(groups, run_config(tp, pp, checkpoint, save_dir, **flags))
        save_checkpoint(trainer, TrainingProgress(1, 1), hf_folder(latest_checkpoint(Path(checkpoint))[0]), None)
