"""Checks of toys that the pages in docs/extend add out of tree, in one process on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from llava_mcore.checkpoint.layout import iteration_folder
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.step import train_step
from tests.helpers.batches import FakeLoader, micro_batch
from tests.parallel.checks import load_model
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config


def assert_same_logits(groups: Groups, checkpoint: Path, model: PreTrainedModel) -> None:
    """Compare an imported checkpoint with the model of transformers, on images and text."""
    ours = load_model(groups, iteration_folder(checkpoint, 0))
    batch = micro_batch(model.config, [0, 1, 2], {1})
    with torch.no_grad():
        found = ours(batch.input_ids, batch.position_ids, batch.media)
        expected = model(input_ids=batch.input_ids, pixel_values=batch.media["pixel_values"]).logits
    assert (found - expected).abs().max() <= 1e-5


def train_a_little(groups: Groups, checkpoint: Path, save_dir: Path, steps: int = 6) -> list[float]:
    """Train on two batches over and over and return the losses."""
    trainer = make_trainer(groups, run_config(1, 1, str(checkpoint), str(save_dir)))
    loader = FakeLoader(trainer.hf, micro_batch_size=4, dp_rank=0, dp_size=1, text_only={1, 3})
    losses = []
    for _ in range(steps):
        batches, *_ = fetch_step(groups, loader, 2, SkipBudget(0.0), trainer.fields)
        parts = trainer.chunks, trainer.optimizer, trainer.scheduler
        losses.append(train_step(groups, *parts, batches, GLOBAL_BATCH).result().loss)
    return losses
