"""Steps whose loss or gradients are not finite: report them, save their batch, skip the update or end the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import TrainingError, problems
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.batch_counts import LoadedBatch
from llava_mcore.training.closing import warn_on_failure
from llava_mcore.training.fetch import ReadStep
from llava_mcore.training.step import StepResult

MAX_IN_A_ROW = 10
"""Consecutive updates that `--on-nan skip` skips before it ends the run: by then the weights are broken."""


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
