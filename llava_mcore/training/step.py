"""One optimizer step: forward and backward over the micro-batches, gradient finalization, update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from llava_mcore.compat.megatron.optimizer import update_unless
from llava_mcore.models.language.router import ExpertLoads
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.named_sums import Datasets, Sums, collect_sums, dataset_sum
from llava_mcore.parallel.on_device import AsyncHostCopy, DeviceEvent
from llava_mcore.parallel.share import SharedStep
from llava_mcore.training.graphs.layer_graphs import LayerGraphs
from llava_mcore.training.logs.expert_loads import ExpertTokens, load_sums
from llava_mcore.training.logs.metrics_file import DEVICE_SUMS
from llava_mcore.training.loss_terms import LOSS_TERMS
from llava_mcore.training.optimization.data_parallel import DataParallelModel

LOSS = "loss"
"""Name of the summed cross-entropy and the number of trained tokens in a report."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step. `loss` is the mean over the trained tokens of the whole global batch.

    updated: whether the weights changed. They do not if fp16 gradients overflowed, or if loss or gradients were not
        finite in a step that updates only if they are.
    finite: whether loss and gradient norm are finite. not_finite: this rank's micro-batches with a loss that is not.
    lr: the learning rate of parts without their own. sums: total and count of the other named sums that the global
        batch has. loads: tokens of each expert of each layer, without padding; empty without experts.
    """

    loss: float
    grad_norm: float
    lr: float
    num_trained_tokens: int
    updated: bool
    finite: bool = True
    not_finite: tuple[int, ...] = ()
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    loads: ExpertTokens = ()


def loss_sum(loss_mask: Tensor, report: Sums, total: Tensor) -> tuple[Tensor, Tensor, Sums]:
    """Return the summed loss of the trained tokens and their number, and add both to the report. loss_mask: [b, s]."""
    count = loss_mask.sum().to(torch.int)
    report[LOSS] = torch.stack([total.detach(), count.float()])
    return total, count, report


def forward_step(
    reports: list[Sums], num_datasets: int, batches: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[Tensor, partial]:
    """Run one micro-batch through this stage (called by megatron-core's schedules), and append its named sums."""
    batch = next(batches)
    datasets = Datasets(batch.dataset_ids, num_datasets) if batch.dataset_ids.numel() else None
    with collect_sums(datasets) as report:
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
    reports.append(report)
    return output, partial(loss_sum, batch.loss_mask, report)


def forward_backward(
    chunks: Sequence[DataParallelModel],
    batches: SharedStep,
    *,
    forward_only: bool = False,
    num_datasets: int = 0,
) -> list[Sums]:
    """Run the pipeline schedule over one step's micro-batches.

    Args:
        num_datasets: of the blend, whose losses are reported for each dataset too; 0 without a blend.

    Returns:
        The named sums of each micro-batch, as they are on this rank; on the last stage they have LOSS. With several
        chunks, those of each chunk.
    """
    micro_batch_size, local_length = batches.shape
    iterators = [iter(batches), *(batches.without_media() for _ in chunks[1:])]  # the first chunk has the tower
    reports: list[Sums] = []
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, reports, num_datasets),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=local_length * chunks[0].config.context_parallel_size,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    return reports


def train_step(
    groups: Groups,
    chunks: Sequence[DataParallelModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batches: SharedStep,
    num_samples: int,
    graphs: Sequence[LayerGraphs] = (),
    *,
    only_if_finite: bool = False,
    dataset_names: Sequence[str] = (),
    loads: ExpertLoads | None = None,
) -> LaunchedStep:
    """Launch the training on one global batch; a collective call.

    The host does not wait for the device, so it can launch the next step while this one is computed.

    Args:
        num_samples: number of samples by which the learning-rate schedule advances.
        only_if_finite: keep the weights as they were if loss or gradient norm are not finite. The host waits for both
            before the update. It does so for fp16 too, whose loss scaler decides on the update.
        dataset_names: of a blend, as many on all ranks: the result has the loss of each. Empty without a blend.
        loads: counters of tokens per expert, which go into the result; for a model with experts.
    """
    # Capture graphs for shapes that the last step ran without one; gradients begin at zero.
    for part in graphs:
        part.capture()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # Gradients of all micro-batches, and the sums of their losses. Nothing waits for the device.
    reports = forward_backward(chunks, batches, num_datasets=len(dataset_names))
    lr = scheduler.get_lr({})
    sums = _StepSums(groups, reports, dataset_names, loads)
    # The update, and with it the schedule.
    norm: Tensor | float | None
    if only_if_finite:
        updated, norm = update_unless(optimizer, lambda norm: not (sums.is_finite() and math.isfinite(norm)))
    else:
        updated, norm, _ = optimizer.step()
    if updated:  # fp16 skips an update whose gradients overflowed
        scheduler.step(increment=num_samples)
    return LaunchedStep(
        sums,
        AsyncHostCopy(torch.as_tensor(0.0 if norm is None else norm).reshape(1)),
        lr,
        updated,
        DeviceEvent(groups.device),
    )


class _StepSums:
    """The named sums of one step, added up on the device and copied to the host while the device continues."""

    def __init__(
        self,
        groups: Groups,
        reports: Sequence[Sums],
        dataset_names: Sequence[str],
        loads: ExpertLoads | None,
    ) -> None:
        """Add the reports over micro-batches, stages and model replicas; a collective call of the devices, for which
        the host does not wait. The loss of a replica is counted once.

        All ranks send the same names, those that the tables know: (loss, trained tokens), then of every other name its
        total, its count, and on how many reports it is; then the tokens of all experts.
        """
        self._datasets = {dataset_sum(index): f"{LOSS}/{name}" for index, name in enumerate(dataset_names)}
        self._names = (*DEVICE_SUMS, *LOSS_TERMS, *self._datasets)
        unknown = {name for report in reports for name in report}.difference(self._names, [LOSS])
        assert not unknown, (
            f"{', '.join(sorted(unknown))}: add the name to DEVICE_SUMS in training/logs/metrics_file.py"
        )
        self._losses = torch.zeros(0, 2, dtype=torch.float64, device=groups.device)
        if groups.reports_loss:
            self._losses = torch.stack([report[LOSS] for report in reports if LOSS in report]).double()
        others = [self._total_of(name, reports) for name in self._names]
        self._num_experts = 0 if loads is None else loads.num_experts
        of_experts = [] if loads is None else [loads.take(groups.device).flatten()]
        sums = torch.cat([self._losses.sum(0), *others, *of_experts])
        dist.all_reduce(sums)
        self._sums = AsyncHostCopy(sums)

    def _total_of(self, name: str, reports: Sequence[Sums]) -> Tensor:
        """Return total, count and number of this rank's reports with a name, [3]."""
        pairs = [report[name] for report in reports if name in report]
        if not pairs:
            return self._losses.new_zeros(3)
        return torch.cat([torch.stack(pairs).sum(0), self._losses.new_full((1,), len(pairs))])

    def loss(self) -> tuple[float, float]:
        """Return the summed loss and the number of trained tokens of the global batch. The host waits for the
        device."""
        total, count, *_ = self._sums.read()
        return total, count

    def others(self) -> dict[str, tuple[float, float]]:
        """Return total and count of the other names that any rank has reported. The host waits for the device."""
        values = self._sums.read()[2 : 2 + 3 * len(self._names)]
        rows = zip(self._names, values[::3], values[1::3], values[2::3], strict=True)
        # A dataset that the batch has no trained token of has no loss.
        return {
            self._datasets.get(name, name): (total, count)
            for name, total, count, num_reports in rows
            if num_reports and (count or name not in self._datasets)
        }

    def loads(self) -> ExpertTokens:
        """Return the tokens of each expert of each layer. The host waits for the device."""
        values = self._sums.read()[2 + 3 * len(self._names) :]
        return [values[i : i + self._num_experts] for i in range(0, len(values), self._num_experts or 1)]

    def is_finite(self) -> bool:
        """Return whether the summed loss is finite; the same on all ranks. The host waits for the device."""
        return math.isfinite(self.loss()[0])

    def not_finite(self) -> tuple[int, ...]:
        """Return this rank's micro-batches whose loss is not finite. The host waits for the device."""
        return tuple((~self._losses[:, 0].isfinite()).nonzero()[:, 0].tolist())


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still be computing.

    lr: the learning rate of parts without their own. updated: see StepResult. end: reached after the update.
    """

    sums: _StepSums
    norm: AsyncHostCopy
    lr: float
    updated: bool
    end: DeviceEvent

    def result(self) -> StepResult:
        """Return the result; the host waits for the device."""
        total, count = self.sums.loss()
        [norm] = self.norm.read()
        loss = total / count if count else float("nan")
        finite = math.isfinite(total) and math.isfinite(norm)
        not_finite = () if finite else self.sums.not_finite()
        loads = self.sums.loads()
        sums = self.sums.others() | load_sums(loads)
        return StepResult(loss, norm, self.lr, int(count), self.updated, finite, not_finite, sums, loads)
