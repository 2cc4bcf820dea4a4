"""Training runs inside a test world."""

from __future__ import annotations

from collections.abc import Collection
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
    text_only: set[int],
    kind: type[FakeLoader] = FakeLoader,
    most_steps: int | None = None,
) -> dict[str, list[float]]:
    """Train and return losses and gradient norms; `most_steps` ends it early."""
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
    mixed = {1, 4, 5, 6, 7}  # some data-parallel ranks meet only text in some micro-batches
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
        "last layer": (untied, mixed, short | last),
        "last layer + recompute": (untied, mixed, short | last | {"model.recompute": "full"}),
        "rates": (untied, mixed, short | rates),
        "plain": (untied, mixed, {}),
        "distributed": (untied, mixed, {"parallel.use_distributed_optimizer": True}),
        "tied": (tied, mixed, short),
        "text only": (untied, set(range(8)), short),
        "pictures only": (untied, set(), short),
        "stage 1": (untied, mixed, short | stage1),
        "short": (untied, mixed, short),
        "packed": (untied, mixed, short),
        "bf16": (untied, mixed, short | {"training.precision": "bf16"}),
        "fp16": (untied, mixed, short | {"training.precision": "fp16", "training.loss_scale": 128.0}),
        "fp16, adapting": (untied, mixed, {"training.precision": "fp16", "training.train_iters": 8}),
    }
    runs = {name: run for name, run in runs.items() if chosen is None or name in chosen}
    return run_all(groups, runs, save_dir, most_steps)


def curves_of_classes(
    tp: int, pp: int, checkpoints: dict[str, str], save_dir: str, variants: bool = True
) -> dict[str, Any]:
    """Short runs of every class, padded and packed; with `variants` also bf16, text alone, and parts frozen."""
    short = {"training.train_iters": 3}
    parts = ("vision_model", "vision_projection", "language_model")
    only = {part: {f"model.freeze_{other}": other != part for other in parts} for part in parts}
    runs = {}
    for name, checkpoint in checkpoints.items():
        runs[f"{name}, plain"] = (checkpoint, {1, 4, 5, 6, 7}, short)
        runs[f"packed {name}"] = (checkpoint, {1, 4, 5, 6, 7}, short)
        if not variants:
            continue
        runs[f"{name}, text alone"] = (checkpoint, set(range(8)), short)
        runs[f"bf16 {name}"] = (checkpoint, {1, 4, 5, 6, 7}, short | {"training.precision": "bf16"})
        runs[f"{name}, recompute"] = (checkpoint, {1, 4, 5, 6, 7}, short | {"model.recompute": "full"})
        runs |= {f"{name}, only {part}": (checkpoint, {1, 4, 5, 6, 7}, short | flags) for part, flags in only.items()}
    return run_all(join(tp, pp), runs, save_dir)


def run_all(
    groups: Groups,
    runs: dict[str, tuple[str, set[int], dict[str, Any]]],
    save_dir: str,
    most_steps: int | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Train every run, for `most_steps` at most, and return its curve."""
    out = {}
    for name, (checkpoint, text_only, flags) in runs.items():
        kind = PackedLoader if name.startswith("packed") else FakeLoader
        run = run_config(groups.tp_size, groups.pp_size, checkpoint, save_dir, **flags)
        out[name] = curve(groups, run, text_only, kind, most_steps)
    torch.distributed.barrier()
    return out
