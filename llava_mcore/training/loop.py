"""The training loop."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from llava_mcore.errors import DataError, LlavaMcoreError, problems
from llava_mcore.models.flops import TrainedParts, Workload, mfu, model_flops, peak_flops
from llava_mcore.parallel.batch import MicroBatch, share_step
from llava_mcore.parallel.groups import Groups, agree
from llava_mcore.training.metrics import Metrics, MetricsFile
from llava_mcore.training.setup import Trainer
from llava_mcore.training.skipped import Counts, LoadedBatch, SkipBudget, count_all
from llava_mcore.training.state import Progress, save_checkpoint
from llava_mcore.training.step import train_step

logger = logging.getLogger(__name__)


class Loader(Protocol):
    """Where a rank's micro-batches come from."""

    def __next__(self) -> LoadedBatch: ...

    def state(self) -> Any: ...


def train(trainer: Trainer, loader: Loader | None, progress: Progress, hf: Path) -> None:
    """Train until `train_iters`; a collective call.

    Args:
        loader: on ranks that load data.
        hf: folder with the files that travel inside checkpoints.
    """
    run, groups = trainer.run, trainer.groups
    metrics_file = MetricsFile(run.run_dir, keep_until=progress.iteration) if groups.rank == 0 else None
    num_micro_batches = run.training.global_batch_size // (run.training.micro_batch_size * groups.dp_size)
    budget = SkipBudget(run.data.max_skip_rate)
    trained = TrainedParts(
        language_model=not run.model.freeze_language_model,
        vision_model=not run.model.freeze_vision_model,
        vision_projection=not run.model.freeze_vision_projection,
    )
    peak = peak_flops(torch.cuda.get_device_name()) if groups.device.type == "cuda" else None
    saved_at = -1
    while progress.iteration < run.training.train_iters:
        start = time.perf_counter()
        batches, counts = fetch_step(groups, loader, num_micro_batches, budget)
        progress.consumed_conversations += counts.num_conversations
        progress.skipped_conversations += counts.num_skipped
        budget.check(groups, progress.consumed_conversations, progress.skipped_conversations)
        waited = time.perf_counter() - start
        result = train_step(
            groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, run.training.global_batch_size
        )
        progress.iteration += 1
        progress.consumed_samples += run.training.global_batch_size
        seconds = time.perf_counter() - start
        flops = model_flops(trainer.hf, Workload(counts.num_tokens, counts.num_pairs, counts.num_images), trained).total
        metrics = Metrics(
            iteration=progress.iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            num_tokens=counts.num_tokens,
            num_trained_tokens=result.num_trained_tokens,
            num_conversations=counts.num_conversations,
            num_skipped=counts.num_skipped,
            num_truncated=counts.num_truncated,
            fill=counts.num_tokens / counts.num_places,
            tokens_per_second=counts.num_tokens / seconds,
            step_seconds=seconds,
            data_wait_seconds=waited,
            consumed_samples=progress.consumed_samples,
            tflops_per_device=flops / seconds / groups.world_size / 1e12,
            mfu=None if peak is None else mfu(flops, seconds, groups.world_size, peak),
            memory_gib=torch.cuda.max_memory_allocated() / 2**30 if groups.device.type == "cuda" else None,
        )
        if metrics_file is not None:
            metrics_file.append(metrics)
        if progress.iteration % run.logging.log_interval == 0:
            logger.info(metrics.line(run.training.train_iters, groups.world_size))
        interval = run.checkpoint.save_interval
        if interval is not None and progress.iteration % interval == 0:
            save_checkpoint(trainer, progress, hf, loader.state() if loader is not None else None)
            saved_at = progress.iteration
    if run.checkpoint.saves and saved_at != progress.iteration:
        save_checkpoint(trainer, progress, hf, loader.state() if loader is not None else None)


def fetch_step(
    groups: Groups, loader: Loader | None, num_micro_batches: int, budget: SkipBudget
) -> tuple[list[MicroBatch], Counts]:
    """Return the step's micro-batches and what the global batch holds; a collective call.

    Raises:
        DataError: on all ranks, when any of them met data that cannot be read.
    """
    batches: list[LoadedBatch] | None = None
    problem: str | None = None
    if loader is not None:
        try:
            batches = [next(loader) for _ in range(num_micro_batches)]
            budget.report(batches)
        except LlavaMcoreError as error:
            problem = str(error)
    found = agree(groups, problem)
    if found:
        raise DataError(problems("training data cannot be used", found), on_all_ranks=True)
    counts = count_all(groups, batches or [])
    return share_step(groups, batches, num_micro_batches), counts
