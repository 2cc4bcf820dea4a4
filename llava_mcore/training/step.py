"""One optimizer step: forward and backward over the micro-batches, gradient finalization, update."""

from __future__ import annotations

import math
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

from llava_mcore.compat.megatron_optimizer import update_unless
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.layer_graphs import LayerGraphs

Report = dict[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """The result of one step. `loss` is the mean over the trained tokens of the whole global batch.

    updated: whether the weights changed. They do not if loss or gradients were not finite or fp16 gradients overflowed.
    finite: whether loss and gradient norm are finite. not_finite: this rank's micro-batches with a loss that is not.
    lr: the learning rate of parts without their own.
    """

    loss: float
    grad_norm: float
    lr: float
    num_trained_tokens: int
    updated: bool
    finite: bool = True
    not_finite: tuple[int, ...] = ()


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
        batch.media,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
        num_trained=batch.num_trained,
        max_media_seqlen=batch.max_media_seqlen,
        media_lengths=batch.media_lengths,
    )
    return output, partial(loss_sum, batch.loss_mask)


def forward_backward(
    chunks: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch], *, forward_only: bool = False
) -> list[Report]:
    """Run the pipeline schedule over one step's micro-batches; returns reports on the last stage."""
    micro_batch_size, seq_length = batches[0].shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
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
    graphs: LayerGraphs | None = None,
) -> StepResult:
    """Train on one global batch; a collective call.

    The host waits for the device once, in megatron-core, for the gradient norm; the loss has arrived by then. If either
    is not finite, the weights stay as they were.
    """
    if graphs is not None:
        graphs.capture()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = forward_backward(chunks, batches)
    lr = scheduler.get_lr({})
    losses = _Losses(groups, reports)
    updated, grad_norm = update_unless(optimizer, lambda norm: not (losses.are_finite and math.isfinite(norm)))
    if updated:  # fp16 skips an update whose gradients overflowed
        scheduler.step(increment=global_batch_size)
    total, count = losses.on_host
    loss = total / count if count else float("nan")
    finite = losses.are_finite and math.isfinite(grad_norm)
    return StepResult(loss, grad_norm, lr, int(count), updated, finite, () if finite else losses.not_finite())


class _Losses:
    """The loss of one step, added up on the device and copied to the host while the device continues."""

    def __init__(self, groups: Groups, reports: Sequence[Report]) -> None:
        """Add (summed loss, trained tokens) over micro-batches and model replicas, each counted once; a collective call
        of the devices, for which the host does not wait."""
        self._each = torch.zeros(0, 2, dtype=torch.float64, device=groups.device)
        if groups.reports_loss:
            self._each = torch.stack([report["sums"] for report in reports]).double()
        sums = self._each.sum(0)
        dist.all_reduce(sums)
        on_gpu = groups.device.type == "cuda"
        self._sums = torch.empty(2, dtype=torch.float64, pin_memory=on_gpu)
        self._sums.copy_(sums, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if on_gpu else None

    @property
    def on_host(self) -> tuple[float, float]:
        """The summed loss and the number of trained tokens of the global batch."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._sums[0].item(), self._sums[1].item()

    @property
    def are_finite(self) -> bool:
        """Whether the summed loss is finite; the same on all ranks."""
        return math.isfinite(self.on_host[0])

    def not_finite(self) -> tuple[int, ...]:
        """Return this rank's micro-batches whose loss is not finite. The host waits for the device."""
        return tuple((~self._each[:, 0].isfinite()).nonzero()[:, 0].tolist())
