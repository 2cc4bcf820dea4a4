"""Loss terms and named sums inside a test world."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llava_mcore.models.loss.terms import ChunkLogits
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.named_sums import with_loss
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.logs.metrics_file import DEVICE_SUMS
from llava_mcore.training.loss_terms import LOSS_TERMS, KnownTerm
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import FakeBatch, FakeLoader
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

STEPS = 2
DATASETS = ("even", "odd")
"""Datasets of the blend that the samples come from, by their number."""


class BlendLoader(FakeLoader):
    """The samples of FakeLoader, of two datasets that mix within a micro-batch."""

    def __next__(self) -> FakeBatch:
        batch = super().__next__()
        of_rows = torch.tensor([int(key) % 2 for key in batch.sample_keys], dtype=torch.int32)
        batch.dataset_ids = of_rows[:, None].expand(batch.input_ids.shape).contiguous()
        return batch


def z_loss(chunk: ChunkLogits) -> Tensor:
    return chunk.log_sum.square()


def penalize_layers(trainer: Trainer, *, divided: bool) -> None:
    """Let every layer add the size of its outputs, as a router adds its auxiliary loss. `divided`: over tp ranks."""

    def hook(module: nn.Module, _: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        hidden, rest = output
        size = hidden.float().square().mean(-1).sum()
        return with_loss(
            hidden, "size", size, hidden.shape[0], coefficient=0.05, config=module.config, divided=divided
        ), rest

    for model in trainer.models:
        for layer in model.language_model.decoder.layers:
            layer.register_forward_hook(hook)


def train_with_terms(tp: int, pp: int, checkpoint: str, save_dir: str) -> dict[str, Any]:
    """Return losses, gradient norms and named sums of runs with an output term and one in every layer."""
    groups = join(tp, pp)
    LOSS_TERMS["z_loss"] = KnownTerm(z_loss, lambda run: 0.02)
    LOSS_TERMS["z"] = KnownTerm(z_loss)
    DEVICE_SUMS.append("size")
    found = {"padded": steps(groups, run_config(tp, pp, checkpoint, save_dir))}
    if tp > 1:
        sequence = run_config(tp, pp, checkpoint, save_dir, **{"parallel.sequence_parallel": True})
        found["sequence parallel"] = steps(groups, sequence)
    if pp > 1:
        chunked = {"parallel.num_layers_per_virtual_pipeline_stage": 1, "training.micro_batch_size": 1}
        found["chunks, recomputed"] = steps(
            groups, run_config(tp, pp, checkpoint, save_dir, **chunked, **{"model.recompute": "full"})
        )
    return found


def steps(groups: Groups, run: Any) -> list[dict[str, Any]]:
    trainer = make_trainer(groups, run)
    penalize_layers(trainer, divided=run.parallel.sequence_parallel)
    size = run.training.micro_batch_size
    loader = None
    if groups.loads_data:
        loader = BlendLoader(
            trainer.hf, micro_batch_size=size, dp_rank=groups.dp_rank, dp_size=groups.dp_size, text_only={1, 3}
        )
    found = []
    for _ in range(STEPS):
        number = GLOBAL_BATCH // (size * groups.dp_size)
        batches, *_ = fetch_step(groups, loader, number, SkipBudget(0.0), trainer.fields)
        parts = trainer.chunks, trainer.optimizer, trainer.scheduler
        result = train_step(groups, *parts, batches, GLOBAL_BATCH, dataset_names=DATASETS).result()
        found.append({"loss": result.loss, "norm": result.grad_norm, "trained": result.num_trained_tokens})
        found[-1] |= {"sums": dict(result.sums), "micro_batch_size": size}
    torch.distributed.barrier()
    return found
