"""One optimizer step: forward and backward over the micro-batches, gradient finalisation, update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import Groups

Report = dict[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one step did. `loss` is the mean over the trained tokens of the whole global batch."""

    loss: float
    grad_norm: float
    lr: float
    num_trained_tokens: int
    updated: bool


def loss_sum(loss_mask: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Report]:
    """Return the summed loss of the trained tokens and their number. loss_mask: [b, s]."""
    count = loss_mask.sum().to(torch.int)
    return total, count, {"sums": torch.stack([total.detach(), count.float()])}


def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, partial]:
    """Run one micro-batch through this stage (called by megatron-core's schedules)."""
    batch = next(batches)
    output = model(
        batch.input_ids,
        batch.position_ids,
        batch.normalised_pixels(),
        batch.image_positions,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(loss_sum, batch.loss_mask)


def forward_backward(
    chunks: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch], *, forward_only: bool = False
) -> list[Report]:
    """Run the pipeline schedule over one step's micro-batches; reports come back on the last stage."""
    micro_batch_size, seq_length = batches[0].shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )


def train_step(
    groups: Groups,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batches: Sequence[MicroBatch],
    global_batch_size: int,
) -> StepResult:
    """Train on one global batch; a collective call."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = forward_backward(chunks, batches)
    lr = scheduler.get_lr(optimizer.param_groups[0]) if optimizer.param_groups else 0.0
    updated, grad_norm, _ = optimizer.step()
    if updated:  # fp16 skips an update whose gradients overflowed
        scheduler.step(increment=global_batch_size)
    total, count = _sum_over_ranks(groups, reports)
    loss = total / count if count else float("nan")
    return StepResult(loss, float(grad_norm or 0.0), lr, int(count), bool(updated))


def _sum_over_ranks(groups: Groups, reports: Sequence[Report]) -> tuple[float, float]:
    """Add (summed loss, trained tokens) over micro-batches and model replicas, each counted once."""
    sums = torch.zeros(2, dtype=torch.float64)
    if groups.reports_loss:
        for report in reports:
            sums += report["sums"].double().cpu()
    dist.all_reduce(sums, group=groups.control)
    return sums[0].item(), sums[1].item()
