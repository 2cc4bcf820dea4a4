"""Training on audio inside a test world: saved, resumed, and what no step may change."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from pathlib import Path
from typing import Any

import torch

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from llava_mcore.weights.layouts import FuseQKV
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

STEPS = 3


def save_and_resume(tp: int, pp: int, checkpoint: str, hf: str, data: str, save_dir: str) -> dict[str, Any]:
    """Train, save, train on; resume and train on. Return both curves, and whether all weights are the same."""
    groups = join(tp, pp)
    flags: dict[str, Any] = {"checkpoint.save": True, "checkpoint.save_optim": True, "name": "sound"}
    run = run_config(tp, pp, checkpoint, save_dir, **flags)
    trainer, loader = make_trainer(groups, run), open_loader(groups, hf, data, None)
    train(groups, trainer, loader)
    state = None if loader is None else loader.state()
    save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
    uninterrupted = train(groups, trainer, loader)
    again = make_trainer(groups, run_config(tp, pp, checkpoint, save_dir, **flags, **{"checkpoint.load_optim": True}))
    _, states = resume(again)
    resumed = train(groups, again, open_loader(groups, hf, data, states))
    pairs = zip(parameters(trainer), parameters(again), strict=True)
    same = all(torch.equal(x, y) for (_, x), (_, y) in pairs)
    return {"curves": (uninterrupted, resumed), "same": same, "constants": constants(again)}


def open_loader(groups: Groups, hf: str, data: str, saved: Any) -> TrainLoader | None:
    if not groups.loads_data:
        return None
    options: dict[str, Any] = {"num_workers": 0, "num_streams": 2, "packing": True, "packing_buffer_size": 6}
    config = DataConfig(path=Path(data), seq_length=256, **options)
    where = {"dp_rank": groups.dp_rank, "dp_size": groups.dp_size}
    return TrainLoader(config, load_assets(Path(hf)), micro_batch_size=1, seed=3, saved=saved, **where)


def train(groups: Groups, trainer: Trainer, loader: TrainLoader | None) -> list[float]:
    found = []
    for _ in range(STEPS):
        batches, *_ = fetch_step(groups, loader, 4, SkipBudget(0.0), trainer.fields)
        result = train_step(
            groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH
        ).result()
        found += [result.loss, result.grad_norm]
    return found


def parameters(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    return [pair for model in trainer.models for pair in model.named_parameters()]


def constants(trainer: Trainer) -> list[float]:
    """Return the largest bias of a key, and the sum of the positions; nothing on stages without an encoder."""
    found = []
    for name, p in parameters(trainer):
        if name.startswith("vision_model.") and name.endswith("linear_qkv.bias"):
            heads = p.numel() // 24  # of 8 numbers, for query, key and value
            found.append(FuseQKV(heads, heads).to_hf(p.detach())[1].abs().max().item())
        if name == "vision_model.position_embeddings.weight":
            found.append(p.detach().double().sum().item())
    return found
