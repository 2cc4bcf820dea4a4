"""The training loop."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

from llava_mcore.data.loader.validation_data import ValidationData
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.parallel.groups import wait_for_all
from llava_mcore.parallel.together import raise_on_all_ranks, raise_together
from llava_mcore.training.answers.answerer import AnswerData, Answerer
from llava_mcore.training.closing import warn_on_failure
from llava_mcore.training.faults.watchdog import Watchdog
from llava_mcore.training.fetch import MicroBatchLoader
from llava_mcore.training.iterations import Iterations
from llava_mcore.training.logs.reporter import Reporter
from llava_mcore.training.logs.start_times import StartTimes
from llava_mcore.training.profiling import IterationProfiler
from llava_mcore.training.saving.host_memory import steps_before_allocation
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress
from llava_mcore.training.setup import Trainer
from llava_mcore.training.stop import StopRules, any_rank
from llava_mcore.training.validation import Validator

logger = logging.getLogger(__name__)


def train(
    trainer: Trainer,
    loader: MicroBatchLoader | None,
    progress: TrainingProgress,
    hf: Path,
    stop: StopRules,
    watchdog: Watchdog,
    times: StartTimes,
    validation: ValidationData | None = None,
    answers: AnswerData | None = None,
) -> bool:
    """Train until all iterations are done or it is time to stop; a collective call.

    Args:
        loader: on ranks that load data.
        hf: folder with the Hugging Face files to copy into checkpoints.
        times: of this process's start, for the log.
        validation: on ranks that load data, if the run validates.
        answers: on ranks that load data, if the run asks questions.

    Returns:
        Whether the run is complete.
    """
    loop = _Loop(trainer, loader, progress, hf, watchdog, times, validation, answers)
    times.begin("first iteration")
    try:
        while not loop.is_complete:
            asked_to_stop = loop.iterate(stop)
            if asked_to_stop:
                break
        loop.raise_log_problem()
    except LlavaMcoreError as error:
        if error.on_all_ranks:
            loop.finish_together()
        raise
    finally:
        loop.close()
    return loop.is_complete


class _Loop:
    """The parts of a training run and the order in which one iteration uses them."""

    def __init__(
        self,
        trainer: Trainer,
        loader: MicroBatchLoader | None,
        progress: TrainingProgress,
        hf: Path,
        watchdog: Watchdog,
        times: StartTimes,
        validation: ValidationData | None,
        answers: AnswerData | None,
    ) -> None:
        self.run, self.groups = trainer.run, trainer.groups
        self.progress, self.watchdog = progress, watchdog
        self.reporter = raise_together(self.groups, lambda: Reporter(trainer, progress, times))
        self.iteration = Iterations(trainer, loader, progress, self.reporter)
        self.saver = Saver(trainer, hf)
        self.validator = Validator(trainer, validation, watchdog)
        self.answerer = raise_together(self.groups, lambda: Answerer(trainer, answers, hf, watchdog))
        self.profiler = IterationProfiler(self.run, self.groups)
        self.first = progress.iteration + 1
        self.allocates_after = steps_before_allocation(self.run)
        self.saved: int | None = None
        """The iteration of the last checkpoint that is kept, if this process has saved one."""

    @property
    def is_complete(self) -> bool:
        """Whether all iterations are done."""
        return self.run.training.fraction_done(self.progress.iteration, self.progress.num_read) >= 1

    def iterate(self, stop: StopRules) -> bool:
        """Train on one global batch, then validate and save if due; a collective call. Returns whether to stop."""
        iteration = self.progress.iteration + 1
        self.watchdog.begin(f"iteration {iteration}")
        with self.profiler.iteration(iteration):
            fetched = self.iteration.fetch(self._flags(stop))
            asked, writing, failed = fetched.flags
            if failed:
                self.raise_log_problem()
            if asked and iteration > self.first:  # every start of a run trains at least once
                self.iteration.report_pending()
                self._save_last(iteration - 1)
                return True
            self.iteration.launch(fetched)
            del fetched  # its pictures would stay in host memory through a validation
        if iteration == self.first:
            self.iteration.report_pending()
            keep_from_garbage_collection()
        if iteration - self.first + 1 == self.allocates_after and self._saves_in_background_after(iteration):
            self.iteration.report_pending()
            self.saver.prepare(self.progress)
        if not self._is_anything_due(iteration):
            self._finish_save(iteration, writing=writing)
            return False
        self.iteration.report_pending()
        return self._do_what_is_due(iteration, stop)

    def _flags(self, stop: StopRules) -> tuple[bool, bool, bool]:
        """Return whether this rank would stop, still writes in the background, and could not write its metrics."""
        return stop.due(), self.saver.busy, self.reporter.problem is not None

    def _is_anything_due(self, iteration: int) -> bool:
        return (
            self.is_complete
            or self.validator.due(iteration, is_last=False)
            or self.answerer.due(iteration, is_last=False)
            or self._saves(iteration)
            or is_due(iteration, self.run.checkpoint.non_persistent_save_interval)
        )

    def _saves(self, iteration: int) -> bool:
        checkpoint = self.run.checkpoint
        return checkpoint.saves and is_due(iteration, checkpoint.save_interval)

    def _saves_in_background_after(self, iteration: int) -> bool:
        """Return whether a save in the background is due after an iteration: the last one is waited for."""
        checkpoint, last = self.run.checkpoint, self.run.training.num_iterations
        temporary = checkpoint.non_persistent_save_interval
        intervals = [checkpoint.save_interval, None if checkpoint.non_persistent_local_dir else temporary]
        due = [(iteration // interval + 1) * interval for interval in intervals if interval is not None]
        return checkpoint.async_save and min(due, default=last) < last

    def _do_what_is_due(self, iteration: int, stop: StopRules) -> bool:
        """Validate, answer questions and save after an iteration; returns whether to stop. What takes minutes is not
        begun if a rank has been asked to stop."""
        asked, writing, failed = any_rank(self.groups, *self._flags(stop))
        if failed:
            self.raise_log_problem()
        if self.validator.due(iteration, is_last=self.is_complete) and (self.is_complete or not asked):
            self.reporter.validation(self.validator.run(iteration))  # before the save, which a resumed run starts from
        if self.answerer.due(iteration, is_last=self.is_complete) and (self.is_complete or not asked):
            self.reporter.answers(self.answerer.run(iteration))
        self._save(iteration, is_last=self.is_complete or asked, writing=writing)
        return asked

    def _save(self, iteration: int, *, is_last: bool, writing: bool) -> None:
        """Save if the iteration is due, or else finish the save in the background once no rank is `writing`."""
        config = self.run.checkpoint
        persistent = self._saves(iteration) or (config.saves and is_last)
        if persistent or is_due(iteration, config.non_persistent_save_interval):
            self.watchdog.begin(f"saving iteration {iteration}")
            background = config.async_save and not is_last
            self.saver.save(self.progress, self.iteration.loader_state(), background=background, persistent=persistent)
            self.saved = iteration if persistent else self.saved
        else:
            self._finish_save(iteration, writing=writing)

    def _finish_save(self, iteration: int, *, writing: bool) -> None:
        if self.saver.pending and not writing:
            self.saver.finish(iteration)

    def _save_last(self, iteration: int) -> None:
        """Save the last iteration of a run that stops, unless it has been saved. The next batch has been read already,
        but it is not trained on."""
        self.watchdog.begin(f"saving iteration {iteration}")
        if self.run.checkpoint.saves and self.saved != iteration:
            self.saver.save(self.progress, self.iteration.loader_state(before_batch=True))
        else:
            self.saver.finish(iteration)

    def raise_log_problem(self) -> None:
        """Raise on all ranks if the metrics could not be written; a collective call."""
        raise_on_all_ranks(self.groups, self.reporter.problem)

    def finish_together(self) -> None:
        """After an error on all ranks: report the previous iteration, finish the save that is being written and close
        the logs; a collective call."""
        self.watchdog.begin("finishing a save")
        warn_on_failure("the previous iteration", self.iteration.report_pending)
        warn_on_failure("the previous save", lambda: self.saver.finish(self.progress.iteration))
        self.watchdog.begin("closing the logs")
        self.reporter.close()
        wait_for_all(self.groups)  # torchrun ends all ranks soon after the first, even the one that reports the error

    def close(self) -> None:
        """Write the profile and close the logs. A second call does nothing."""
        self.profiler.close()
        self.reporter.close()


def keep_from_garbage_collection() -> None:
    """Exclude the objects that exist now, most of them the libraries', from later garbage collections.

    Collections start at different times on each rank, and the other ranks wait.
    """
    gc.collect()
    gc.freeze()


def is_due(iteration: int, interval: int | None) -> bool:
    """Return whether this is one of every `interval` iterations; False without an interval."""
    return interval is not None and iteration % interval == 0
