"""Steps that go wrong: loss or gradients that are not finite, a loss far above the others, too little GPU memory.

A batch with such a loss or gradient is saved and its samples are named; then the update is skipped or the run ends.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import TrainingError, problems
from llava_mcore.log import warn_on_failure
from llava_mcore.parallel.groups import Groups
from llava_mcore.plan.forecast import Forecast
from llava_mcore.training.fetch import LoadedBatch, ReadStep
from llava_mcore.training.step import StepResult

MAX_IN_A_ROW = 10
"""Consecutive updates that `--on-nan skip` skips before it ends the run: by then the weights are broken."""
WINDOW = 32
MIN_LOSSES = 8
"""Losses needed before one can be called a spike."""


@dataclass
class NotFinite:
    """Handles steps that are not finite, as `faults.on_nan` says."""

    run: RunConfig
    groups: Groups
    in_a_row: int = 0

    def check(self, iteration: int, result: StepResult, read: ReadStep | None) -> str | None:
        """Return a warning if the step was not finite and the run continues; a collective call in that case.

        Args:
            read: what this rank has read for the step; None on ranks that read nothing.

        Raises:
            TrainingError: on all ranks, if the run has to end.
        """
        if result.finite:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        message = self._describe(iteration, result, read)
        if self.run.faults.on_nan == "stop" or self.in_a_row >= MAX_IN_A_ROW:
            advice = (
                "inspect the samples, lower --lr, or continue without them: --on-nan skip or "
                f"--skip-train-iteration-range {iteration}-{iteration}"
            )
            if self.in_a_row >= MAX_IN_A_ROW:
                advice = f"{self.in_a_row} updates in a row were skipped: check the weights and --lr, not the data"
            raise TrainingError(f"{message}\n{advice}", on_all_ranks=True)
        return message

    def _describe(self, iteration: int, result: StepResult, read: ReadStep | None) -> str:
        """Read the batch again, save it and name its samples: those of micro-batches whose own loss is not finite, or
        else all."""
        groups, folder = self.groups, self.run.run_dir / "faults" / f"iter_{iteration:07d}"
        if read is not None:
            file = folder / f"dp_{groups.dp_rank:05d}.pt"
            warn_on_failure(f"{file} was not written", lambda: save_batches(file, iteration, read.again()))
        local = (groups.dp_rank, [] if read is None else read.sample_keys, result.not_finite)
        everyone: list[Any] = [None] * groups.world_size
        dist.all_gather_object(everyone, local, group=groups.control)
        keys = {dp_rank: lists for dp_rank, lists, _ in everyone if lists}
        culprits = sorted({(dp_rank, index) for dp_rank, _, indices in everyone for index in indices})
        named = culprits or [(dp_rank, index) for dp_rank in sorted(keys) for index in range(len(keys[dp_rank]))]
        lines = [
            f"micro-batch {index} of data-parallel rank {dp_rank}: {', '.join(keys[dp_rank][index])}"
            for dp_rank, index in named
        ]
        blame = "the loss is not finite in" if culprits else "only the gradients are not finite, after"
        state = "the weights were changed by it, but not saved"
        if not result.updated:
            state = f"the weights are still those of iteration {iteration - 1}"
        title = (
            f"iteration {iteration}: loss {result.loss:g}, gradient norm {result.grad_norm:g}; {state}; the batch is "
            f"in {folder}; {blame}"
        )
        return problems(title, lines)


def save_batches(path: Path, iteration: int, batches: Sequence[LoadedBatch]) -> None:
    """Write micro-batches as plain tensors and sample keys; `torch.load(path, weights_only=True)` reads them."""
    plain = [
        {
            "sample_keys": list(batch.sample_keys),
            "input_ids": batch.input_ids,
            "labels": batch.labels,
            "loss_mask": batch.loss_mask,
            "position_ids": batch.position_ids,
            "cu_seqlens": batch.cu_seqlens,
            **batch.media,
        }
        for batch in batches
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"iteration": iteration, "micro_batches": plain}, path)


@contextlib.contextmanager
def explain_out_of_memory(
    run: RunConfig,
    groups: Groups,
    iteration: int,
    forecast: Forecast | None = None,
    describe: Callable[[int], str | None] = lambda _iteration: None,
) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a TrainingError that lists settings that reduce memory, and the prediction.

    Args:
        describe: returns a line about what the memory is used for, given the iteration.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = torch.cuda.max_memory_reserved() / 2**30
        title = f"rank {groups.rank}: out of GPU memory in iteration {iteration}, at {used:.1f} GiB; to reduce memory:"
        advice = [f"  - {line}" for line in _memory_advice(run, groups, str(error))]
        if forecast is not None:
            advice.append(f"  {forecast.out_of_memory(groups.pp_rank)}")
        described = describe(iteration)
        if described is not None:
            advice.append(f"  {described}")
        raise TrainingError("\n".join([title, *advice, str(error)])) from error


def _memory_advice(run: RunConfig, groups: Groups, message: str) -> Iterator[str]:
    """Yield the other processes on the GPU, from torch's message, then settings that would reduce memory."""
    for process, amount in re.findall(r"Process (\d+) has ([\d.]+ \w+) memory in use", message):
        yield f"another process holds {amount} of this GPU (process {process}; nvidia-smi shows it): stop it"
    if run.training.micro_batch_size > 1:
        yield f"lower --micro-batch-size (now {run.training.micro_batch_size})"
    yield f"lower --seq-length (now {run.data.seq_length})"
    pipeline = "" if run.model.cuda_graphs else f" or --pp (now {groups.pp_size})"
    yield f"raise --tp (now {groups.tp_size}){pipeline}"
    if groups.tp_size > 1 and not run.parallel.sequence_parallel:
        yield "split norms and residuals over the tensor-parallel ranks as well: --sequence-parallel"
    if not run.parallel.divides_optimizer and groups.dp_size > 1:
        yield "shard the optimizer over the data-parallel ranks: --dist-optim"
    if run.optimizer.exp_avg_dtype == "fp32":
        yield "keep AdamW's moments in bf16, with optimizer.use_precision_aware_optimizer (docs/parallel.md, Optimizer)"
    if run.model.cuda_graphs:
        flags = "--cuda-graphs-vision or --cuda-graphs" if run.model.cuda_graphs_vision else "--cuda-graphs"
        yield f"omit {flags}: nothing else can use the memory that graphs reserve (docs/parallel.md)"
    elif run.model.recompute != "full":
        yield f"recompute activations in the backward pass: --recompute full (now {run.model.recompute})"


class SpikeAlert:
    """Compares each loss with the median of those before it."""

    def __init__(self, threshold: float, before: Iterable[float | None] = ()) -> None:
        """`before`: losses of the run so far; None for iterations without one."""
        self.threshold = threshold
        self._losses = deque((x for x in before if x is not None and math.isfinite(x)), maxlen=WINDOW)
        self._first: int | None = None

    def check(self, iteration: int, loss: float) -> str | None:
        """Return a warning if this loss is a spike. Later losses are not compared with spikes."""
        if not math.isfinite(loss):
            return None
        usual = statistics.median(self._losses) if len(self._losses) >= MIN_LOSSES else math.inf
        if loss <= self.threshold * usual:
            self._losses.append(loss)
            self._first = None
            return None
        if self._first is not None and iteration - self._first > WINDOW:
            self._losses.clear()  # not a spike any more: this is the new level
        if self._first is None:
            self._first = max(1, iteration - 1)  # the previous update may be the cause, or this iteration's own data
        return (
            f"loss spike at iteration {iteration}: {loss:.4f} is {loss / usual:.1f} times the recent median "
            f"({usual:.4f}); to skip the data, resume from a checkpoint before iteration "
            f"{self._first} with --skip-train-iteration-range {self._first}-{iteration}"
        )
