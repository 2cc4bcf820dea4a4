"""Iterations: the batch of each is read and counted, and its result is reported while the next one is computed."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llava_mcore.config.sections.faults import parse_ranges
from llava_mcore.parallel.on_device import DeviceEvent
from llava_mcore.training.bad_steps import NotFinite
from llava_mcore.training.fetch import (
    Fetched,
    MicroBatchLoader,
    ReadStep,
    RecordingLoader,
    SkipBudget,
    StepCounts,
    fetch_step,
)
from llava_mcore.training.logs.reporter import Reporter
from llava_mcore.training.saving.state import TrainingProgress
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import LaunchedStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Launched:
    """An iteration whose result has not been read.

    step: None if its batch was not trained on. read: what this rank has read for it; None if it reads no data.
    sums: those of the loader.
    began: before its batch was read. waited: seconds for which the device had no work because of the batch.
    """

    progress: TrainingProgress
    step: LaunchedStep | None
    read: ReadStep | None
    counts: StepCounts
    sums: Mapping[str, tuple[int, int]]
    rates: Mapping[str, float]
    began: DeviceEvent
    end: DeviceEvent
    waited: float


class Iterations:
    """Reads the global batch of each iteration, counts it, and reports the iteration later.

    An iteration's loss is read once the next one has been launched: the device never waits for the host to launch the
    beginning of an iteration. With `--on-nan skip` it is read before the update, which depends on it.
    """

    def __init__(
        self, trainer: Trainer, loader: MicroBatchLoader | None, progress: TrainingProgress, reporter: Reporter
    ) -> None:
        run, groups = trainer.run, trainer.groups
        self.trainer, self.progress, self.reporter = trainer, progress, reporter
        self.batch_sizes = run.training.batch_sizes
        self.loader = None if loader is None else RecordingLoader(loader)
        self.budget = SkipBudget(run.data.max_skip_rate)
        self.skipped = parse_ranges(run.faults.skip_train_iteration_range)
        self.not_finite = NotFinite(run, groups)
        self.began = DeviceEvent(groups.device)
        self.waited = 0.0
        self.size = 0
        self.only_if_finite = run.faults.on_nan == "skip"
        self._launched: _Launched | None = None
        self._last_end: DeviceEvent | None = None
        """The end of the iteration that was reported last; None after a pause."""

    def loader_state(self, *, before_batch: bool = False) -> object:
        """Return the position after or before the last batch, on ranks that load data."""
        if self.loader is None:
            return None
        return self.loader.before if before_batch else self.loader.state()

    def fetch(self, flags: Sequence[bool]) -> Fetched:
        """Read the next batch, and exchange flags with the other ranks; a collective call."""
        groups = self.trainer.groups
        self.began, start = DeviceEvent(groups.device), time.perf_counter()
        self.size = self.batch_sizes.at(self.progress.consumed_samples)
        num_micro_batches = self.size // (self.trainer.run.training.micro_batch_size * groups.dp_size)
        if self.loader is not None:
            self.loader.begin()
        fetched = fetch_step(groups, self.loader, num_micro_batches, self.budget, self.trainer.fields, flags)
        busy = self._launched is not None and not self._launched.end.is_reached
        self.waited = 0.0 if busy else time.perf_counter() - start
        return fetched

    def count(self, counts: StepCounts) -> None:
        """Count the samples of a batch that will be trained on. DataError on all ranks if the run has skipped too many
        samples; a collective call if so."""
        progress = self.progress
        progress.consumed_conversations += counts.num_conversations
        progress.skipped_conversations += counts.num_skipped
        self.budget.check(self.trainer.groups, progress.consumed_conversations, progress.skipped_conversations)

    @property
    def leaves_out_next(self) -> bool:
        """Whether the next iteration is skipped (`--skip-train-iteration-range`)."""
        return any(self.progress.iteration + 1 in left_out for left_out in self.skipped)

    def launched(self, fetched: Fetched, step: LaunchedStep | None, rates: Mapping[str, float]) -> None:
        """Count an iteration that has been launched, and report the one before it; a collective call.

        Args:
            step: None if the batch was not trained on.
            rates: the learning rate of each part in this iteration.
        """
        progress = self.progress
        progress.iteration += 1
        progress.consumed_samples += self.size
        progress.skipped_iterations += step is None
        progress.failed_updates += step is not None and not step.updated
        self._report_launched()
        self._launched = _Launched(
            progress=dataclasses.replace(progress),
            step=step,
            read=None if self.loader is None else self.loader.step(),
            counts=fetched.counts,
            sums=fetched.sums,
            rates=rates,
            began=self.began,
            end=DeviceEvent(self.trainer.groups.device) if step is None else step.end,
            waited=self.waited,
        )
        if self.only_if_finite:
            self._report_launched()

    def report_pending(self) -> None:
        """Wait for the iteration that was launched last, check and report it; a collective call. What follows until the
        next iteration is not counted as a part of it.

        Raises:
            TrainingError: on all ranks, if its loss or gradients were not finite and the run has to end.
        """
        self._report_launched()
        self._last_end = None

    def _report_launched(self) -> None:
        launched, self._launched = self._launched, None
        if launched is None:
            return
        iteration = launched.progress.iteration
        result = None if launched.step is None else launched.step.result()
        if result is None:
            warning: str | None = (
                f"iteration {iteration}: its data was read but not trained on (--skip-train-iteration-range)"
            )
        else:
            warning = self.not_finite.check(iteration, result, launched.read)
        if warning is not None and self.trainer.groups.rank == 0:
            logger.warning(warning)
        seconds = launched.end.seconds_since(self._last_end or launched.began)
        self._last_end = launched.end
        self.reporter.step(
            launched.progress,
            launched.counts,
            result,
            sums={**launched.sums, **({} if result is None else result.sums)},
            rates=launched.rates,
            waited=launched.waited,
            seconds=seconds,
        )
