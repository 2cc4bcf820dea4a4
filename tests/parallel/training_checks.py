"""Training runs inside a test world."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llava_mcore.checkpoint.choose_start import start_point
from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.random import seed_everything
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.setup import Trainer, build_trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import FakeLoader, PackedLoader
from tests.parallel.checks import join

GLOBAL_BATCH = 8
MIXED = frozenset({1, 4, 5, 6, 7})
"""Samples without images: some data-parallel ranks meet only text in some micro-batches."""


@dataclass(frozen=True)
class TrainingRun:
    """A short run on made-up samples, packed or padded; those of `text_only` have no images."""

    checkpoint: str
    text_only: Collection[int]
    flags: Mapping[str, Any]
    packed: bool = False


def run_config(tp: int, pp: int, checkpoint: str | None, save_dir: str, **flags: Any) -> RunConfig:
    base = {
        "checkpoint.load": checkpoint,
        "checkpoint.save_dir": save_dir,
        "parallel.tensor_model_parallel_size": tp,
        "parallel.pipeline_model_parallel_size": pp,
        "parallel.backend": "nccl" if torch.cuda.is_available() else "gloo",
        "training.precision": "fp32",
        "model.transformer_impl": "local",
        "training.train_iters": 20,
        "training.micro_batch_size": 4,
        "training.global_batch_size": GLOBAL_BATCH,
        "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.01,
        "model.freeze_vision_model": False,
    }
    return load_run_config(None, [], base | flags)


def make_trainer(groups: Groups, run: RunConfig) -> Trainer:
    seed_everything(run.training.seed)
    return build_trainer(run, groups, start_point(run))


def curve(
    groups: Groups,
    run: RunConfig,
    text_only: Collection[int],
    kind: type[FakeLoader] = FakeLoader,
    most_steps: int | None = None,
    after_step: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Train and return losses and gradient norms; `most_steps` ends it early. `after_step` is called with the number of
    steps so far."""
    trainer = make_trainer(groups, run)
    size = run.training.micro_batch_size
    loader = None
    if groups.loads_data:
        loader = kind(
            trainer.hf, micro_batch_size=size, dp_rank=groups.dp_rank, dp_size=groups.dp_size, text_only=text_only
        )
    losses, norms, rates = [], [], []
    for _ in range(min(run.training.train_iters, most_steps or run.training.train_iters)):
        batches, *_ = fetch_step(
            groups, loader, GLOBAL_BATCH // (size * groups.dp_size), SkipBudget(0.0), trainer.fields
        )
        result = train_step(
            groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH
        ).result()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        rates.append(result.lr)
        if after_step is not None:
            after_step(len(losses))
    return {"loss": losses, "grad_norm": norms, "lr": rates}


def curves(tp: int, pp: int, checkpoints: dict[str, str], save_dir: str) -> dict[str, dict[str, list[float]]]:
    """All runs of one layout: plain, distributed optimizer, text-only batches, frozen parts."""
    return curves_of(join(tp, pp), checkpoints, save_dir)


def curves_of(
    groups: Groups,
    checkpoints: dict[str, str],
    save_dir: str,
    chosen: Collection[str] | None = None,
    most_steps: int | None = None,
) -> dict[str, dict[str, list[float]]]:
    """The same in a world that has been joined; only the `chosen` runs, if given, and their first steps."""
    untied, tied = checkpoints["untied"], checkpoints["tied"]
    short = {"training.train_iters": 3}
    stage1 = {"model.freeze_language_model": True, "model.freeze_vision_model": True}
    rates = {
        "optimizer.vision_lr": 3e-3,
        "optimizer.projection_lr": 3e-4,
        "optimizer.min_lr": 1e-4,
        "optimizer.weight_decay": 0.1,
        "optimizer.decay_norms_and_biases": True,
        "optimizer.clip_grad": 0.0,
        "model.freeze_language_model": True,
        "model.freeze": "*.class_embedding",
        "model.unfreeze": "language_model.model.layers.2.*,model.language_model.layers.3.mlp.*,lm_head.weight",
    }
    last = {
        "model.freeze": "*",
        "model.unfreeze": "*.layers.3.self_attn.[qkv]_proj.weight",
        "model.freeze_vision_model": True,
    }  # nothing is trained on a pipeline's first stage
    runs = {
        "last layer": TrainingRun(untied, MIXED, short | last),
        "last layer + recompute": TrainingRun(untied, MIXED, short | last | {"model.recompute": "full"}),
        "rates": TrainingRun(untied, MIXED, short | rates),
        "plain": TrainingRun(untied, MIXED, {}),
        "distributed": TrainingRun(untied, MIXED, {"parallel.use_distributed_optimizer": True}),
        "tied": TrainingRun(tied, MIXED, short),
        "text only": TrainingRun(untied, range(GLOBAL_BATCH), short),
        "images only": TrainingRun(untied, (), short),
        "stage 1": TrainingRun(untied, MIXED, short | stage1),
        "short": TrainingRun(untied, MIXED, short),
        "packed": TrainingRun(untied, MIXED, short, packed=True),
        "bf16": TrainingRun(untied, MIXED, short | {"training.precision": "bf16"}),
        "fp16": TrainingRun(untied, MIXED, short | {"training.precision": "fp16", "training.loss_scale": 128.0}),
        "fp16, adapting": TrainingRun(untied, MIXED, {"training.precision": "fp16", "training.train_iters": 8}),
    }
    runs = {name: run for name, run in runs.items() if chosen is None or name in chosen}
    return run_all(groups, runs, save_dir, most_steps)


def curves_of_classes(
    tp: int, pp: int, checkpoints: dict[str, str], save_dir: str, variants: bool = True
) -> dict[tuple[str, str], Any]:
    """Short runs of every class, padded and packed; with `variants` also bf16, text alone, and parts frozen.

    Returns class and variant -> curve.
    """
    short = {"training.train_iters": 3}
    parts = ("vision_model", "vision_projection", "language_model")
    only = {part: {f"model.freeze_{other}": other != part for other in parts} for part in parts}
    runs = {}
    for name, checkpoint in checkpoints.items():
        runs[name, "plain"] = TrainingRun(checkpoint, MIXED, short)
        runs[name, "packed"] = TrainingRun(checkpoint, MIXED, short, packed=True)
        if not variants:
            continue
        runs[name, "text alone"] = TrainingRun(checkpoint, range(GLOBAL_BATCH), short)
        runs[name, "bf16"] = TrainingRun(checkpoint, MIXED, short | {"training.precision": "bf16"})
        runs[name, "recompute"] = TrainingRun(checkpoint, MIXED, short | {"model.recompute": "full"})
        runs |= {(name, f"only {part}"): TrainingRun(checkpoint, MIXED, short | x) for part, x in only.items()}
    return run_all(join(tp, pp), runs, save_dir)


def run_all[Key: Hashable](
    groups: Groups, runs: Mapping[Key, TrainingRun], save_dir: str, most_steps: int | None = None
) -> dict[Key, dict[str, list[float]]]:
    """Train every run, for `most_steps` at most, and return its curve."""
    out = {}
    for name, run in runs.items():
        config = run_config(groups.tp_size, groups.pp_size, run.checkpoint, save_dir, **run.flags)
        out[name] = curve(groups, config, run.text_only, PackedLoader if run.packed else FakeLoader, most_steps)
    torch.distributed.barrier()
    return out
