"""A step whose loss or gradients are not finite, and a GPU without memory: what to say and what to keep."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import TrainingError, problems
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.closing import attempt
from llava_mcore.training.skipped import LoadedBatch
from llava_mcore.training.step import StepResult

MOST_IN_A_ROW = 10
"""Updates that `--on-nan skip` leaves out one after the other before it ends the run: the weights are broken then."""


@dataclass
class NotFinite:
    """What is done about steps that are not finite."""

    run: RunConfig
    groups: Groups
    in_a_row: int = 0

    def check(self, iteration: int, result: StepResult, batches: Sequence[LoadedBatch]) -> str | None:
        """Return a warning if the step was not finite and the run continues; a collective call then.

        Args:
            batches: the micro-batches that this rank has read for it; empty on ranks that read none.

        Raises:
            TrainingError: on all ranks, if the run is to end.
        """
        if result.finite:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        message = self._describe(iteration, result, batches)
        if self.run.faults.on_nan == "stop" or self.in_a_row >= MOST_IN_A_ROW:
            advice = (
                "look at the samples, lower --lr, or continue without them: --on-nan skip, or "
                f"--skip-train-iteration-range {iteration}-{iteration}"
            )
            if self.in_a_row >= MOST_IN_A_ROW:
                advice = f"{self.in_a_row} updates in a row were left out: weights or --lr are the cause, not the data"
            raise TrainingError(f"{message}\n{advice}", on_all_ranks=True)
        return message

    def _describe(self, iteration: int, result: StepResult, batches: Sequence[LoadedBatch]) -> str:
        """Save the batch and name its samples, first of all those of micro-batches whose own loss is not finite."""
        groups, folder = self.groups, self.run.run_dir / "faults" / f"iter_{iteration:07d}"
        if batches:
            file = folder / f"dp_{groups.dp_rank:05d}.pt"
            attempt(f"{file} is not written", lambda: save_batches(file, iteration, batches))
        mine = (groups.dp_rank, [list(batch.sample_keys) for batch in batches], result.not_finite)
        everyone: list[Any] = [None] * groups.world_size
        dist.all_gather_object(everyone, mine, group=groups.control)
        keys = {dp_rank: lists for dp_rank, lists, _ in everyone if lists}
        culprits = sorted({(dp_rank, number) for dp_rank, _, numbers in everyone for number in numbers})
        places = culprits or [(dp_rank, number) for dp_rank in sorted(keys) for number in range(len(keys[dp_rank]))]
        lines = [
            f"micro-batch {number} of data-parallel rank {dp_rank}: {', '.join(keys[dp_rank][number])}"
            for dp_rank, number in places
        ]
        blame = "the loss is not finite in" if culprits else "only the gradients are not finite, of"
        title = (
            f"iteration {iteration}: loss {result.loss:g}, gradient norm {result.grad_norm:g}; the weights stay those "
            f"of iteration {iteration - 1}; the batch is in {folder}; {blame}"
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
def out_of_memory_says_what_to_do(run: RunConfig, groups: Groups, iteration: int) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a message with what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = torch.cuda.max_memory_allocated() / 2**30
        title = f"rank {groups.rank}: out of GPU memory in iteration {iteration}, at {used:.1f} GiB; what helps:"
        advice = [f"  - {line}" for line in _memory_advice(run, groups, str(error))]
        raise TrainingError("\n".join([title, *advice, str(error)])) from error


def _memory_advice(run: RunConfig, groups: Groups, said: str) -> Iterator[str]:
    """Yield what makes a run smaller that is not done yet, after what others hold of the GPU as torch `said` it."""
    for process, amount in re.findall(r"Process (\d+) has ([\d.]+ \w+) memory in use", said):
        yield f"another process holds {amount} of this GPU (nvidia-smi shows it; torch calls it {process}): end it"
    if run.training.micro_batch_size > 1:
        yield f"lower --micro-batch-size (now {run.training.micro_batch_size})"
    yield f"lower --seq-length (now {run.data.seq_length})"
    yield f"raise --tp (now {groups.tp_size}) or --pp (now {groups.pp_size})"
    if groups.tp_size > 1 and not run.parallel.sequence_parallel:
        yield "divide norms and residuals over the tensor-parallel ranks as well: --sequence-parallel"
    if not run.parallel.use_distributed_optimizer and groups.dp_size > 1:
        yield "divide the optimizer over the data-parallel ranks: --dist-optim"
    if run.optimizer.exp_avg_dtype == "fp32":
        yield "keep AdamW's moments in bf16, with optimizer.use_precision_aware_optimizer (docs/parallel.md, Optimizer)"
    if run.model.recompute != "full":
        yield f"compute activations again in the backward pass: --recompute full (now {run.model.recompute})"
