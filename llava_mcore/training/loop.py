"""The training loop: the parts of a run, and the order in which one iteration uses them."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.log import warn_on_failure
from llava_mcore.parallel.groups import Groups, sum_over_ranks, wait_for_all
from llava_mcore.parallel.together import raise_on_all_ranks
from llava_mcore.processes.watchdog import Watchdog
from llava_mcore.training.answers.answerer import Answerer
from llava_mcore.training.bad_steps import explain_out_of_memory
from llava_mcore.training.diagnostics import IterationProfiler
from llava_mcore.training.fetch import Fetched
from llava_mcore.training.iterations import Iterations
from llava_mcore.training.logs.reporter import Reporter, StartTimes
from llava_mcore.training.memory_snapshot import MemoryRecorder
from llava_mcore.training.optimization.optimizer import learning_rates
from llava_mcore.training.saving.pending import steps_before_allocation
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import LaunchedStep, train_step
from llava_mcore.training.validation import Validator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StopRules:
    """Reasons to end a run before its last iteration: a request, or a time that is up. Ranks may differ: they have to
    agree in a collective call."""

    asked: Callable[[], bool]
    until: float | None
    """Value of time.monotonic() at which the time is up."""

    def due(self) -> bool:
        """Return whether this rank would stop."""
        return self.asked() or (self.until is not None and time.monotonic() >= self.until)


@dataclass
class TrainingLoop:
    """A run's parts, and their order in an iteration. It is built once (`assembly.py`), at the same time on all ranks.

    times: of this process's start, for the log.
    """

    trainer: Trainer
    progress: TrainingProgress
    iterations: Iterations
    reporter: Reporter
    saver: Saver
    validator: Validator
    answerer: Answerer
    profiler: IterationProfiler
    memory: MemoryRecorder
    stop: StopRules
    watchdog: Watchdog
    times: StartTimes
    dataset_names: Sequence[str]
    """Names of a blend's datasets, for the log; on other ranks than the first, only their number counts."""
    first: int = field(init=False)
    """The first iteration of this process."""
    saved: int | None = field(init=False, default=None)
    """The iteration of the last checkpoint that is kept, if this process has saved one."""

    def __post_init__(self) -> None:
        self.first = self.progress.iteration + 1

    @property
    def config(self) -> RunConfig:
        return self.trainer.run

    @property
    def groups(self) -> Groups:
        return self.trainer.groups

    @property
    def is_complete(self) -> bool:
        """Whether all iterations are done."""
        return self.config.training.fraction_done(self.progress.iteration, self.progress.num_read) >= 1

    def run(self) -> bool:
        """Train until all iterations are done or it is time to stop; return whether they are done. A collective
        call."""
        self.times.begin("first iteration")
        try:
            while not self.is_complete:
                asked_to_stop = self.iterate()
                if asked_to_stop:
                    break
            self.raise_log_problem()
        except LlavaMcoreError as error:
            if error.on_all_ranks:
                self.finish_together()
            raise
        finally:
            self.close()
        return self.is_complete

    def iterate(self) -> bool:
        """Train on one global batch, then validate and save if due; a collective call. Returns whether to stop."""
        iteration = self.progress.iteration + 1
        self.watchdog.begin(f"iteration {iteration}")

        # Read the batch. The same collective call exchanges the ranks' flags, at no extra cost.
        with self.profiler.iteration(iteration), self.memory.iteration(iteration):
            fetched = self.iterations.fetch(self._flags())
            asked, writing, failed = fetched.flags
            if failed:
                self.raise_log_problem()
            if asked and iteration > self.first:  # every start of a run trains at least once
                self.iterations.report_pending()
                self._save_last(iteration - 1)
                return True
            self._launch(fetched)
            del fetched  # its images would stay in host memory through a validation

        # Once per process, when the first iterations have shown what is needed.
        if iteration == self.first:
            self.iterations.report_pending()
            keep_from_garbage_collection()
        if iteration - self.first + 1 == steps_before_allocation(self.config) and self._saves_in_background(iteration):
            self.iterations.report_pending()
            self.saver.prepare(self.progress)

        # Without a validation or a save, the device keeps computing: its result is read in the next iteration.
        if not self._is_anything_due(iteration):
            self._finish_save(iteration, writing=writing)
            return False
        self.iterations.report_pending()
        return self._do_what_is_due(iteration)

    def _launch(self, fetched: Fetched) -> None:
        """Launch the training on a batch, unless its iteration is left out, and report the previous iteration; a
        collective call."""
        trainer, iterations = self.trainer, self.iterations
        iterations.count(fetched.counts)
        rates = learning_rates(trainer.run, trainer.scheduler)  # the step changes them
        step: LaunchedStep | None = None
        by_epochs = self.config.training.samples_to_read is not None  # the learning rate then follows what was read
        if not iterations.leaves_out_next:
            with explain_out_of_memory(
                trainer.run,
                trainer.groups,
                self.progress.iteration + 1,
                self.reporter.forecast,
                self.memory.out_of_memory,
            ):
                step = train_step(
                    trainer.groups,
                    trainer.chunks,
                    trainer.optimizer,
                    trainer.scheduler,
                    fetched.batches,
                    fetched.counts.num_read if by_epochs else iterations.size,
                    trainer.graphs,
                    only_if_finite=iterations.only_if_finite,
                    dataset_names=self.dataset_names,
                    loads=trainer.loads,
                )
        iterations.launched(fetched, step, rates)

    def _flags(self) -> tuple[bool, bool, bool]:
        """Return three flags: this rank would stop, still writes in the background, failed to write its metrics."""
        return self.stop.due(), self.saver.busy, self.reporter.problem is not None

    def _is_anything_due(self, iteration: int) -> bool:
        return (
            self.is_complete
            or self.validator.due(iteration, is_last=False)
            or self.answerer.due(iteration, is_last=False)
            or self._saves(iteration)
            or is_due(iteration, self.config.checkpoint.non_persistent_save_interval)
        )

    def _saves(self, iteration: int) -> bool:
        checkpoint = self.config.checkpoint
        return checkpoint.saves and is_due(iteration, checkpoint.save_interval)

    def _saves_in_background(self, iteration: int) -> bool:
        """Return whether a save in the background is due after an iteration: the last one is waited for."""
        checkpoint, last = self.config.checkpoint, self.config.training.num_iterations
        temporary = checkpoint.non_persistent_save_interval
        intervals = [checkpoint.save_interval, None if checkpoint.non_persistent_local_dir else temporary]
        due = [(iteration // interval + 1) * interval for interval in intervals if interval is not None]
        return checkpoint.async_save and min(due, default=last) < last

    def _do_what_is_due(self, iteration: int) -> bool:
        """Validate, answer questions and save after an iteration; returns whether to stop. Tasks that take minutes
        are not started if a rank has been asked to stop."""
        asked, writing, failed = (count > 0 for count in sum_over_ranks(self.groups, self._flags()))
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
        config = self.config.checkpoint
        persistent = self._saves(iteration) or (config.saves and is_last)
        if persistent or is_due(iteration, config.non_persistent_save_interval):
            self.watchdog.begin(f"saving iteration {iteration}")
            background = config.async_save and not is_last
            self.saver.save(self.progress, self.iterations.loader_state(), background=background, persistent=persistent)
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
        if self.config.checkpoint.saves and self.saved != iteration:
            self.saver.save(self.progress, self.iterations.loader_state(before_batch=True))
        else:
            self.saver.finish(iteration)

    def raise_log_problem(self) -> None:
        """Raise on all ranks if the metrics could not be written; a collective call."""
        raise_on_all_ranks(self.groups, self.reporter.problem)

    def finish_together(self) -> None:
        """After an error on all ranks: report the previous iteration, finish the save that is being written and close
        the logs; a collective call."""
        self.watchdog.begin("finishing a save")
        warn_on_failure("the previous iteration", self.iterations.report_pending)
        warn_on_failure("the previous save", lambda: self.saver.finish(self.progress.iteration))
        self.watchdog.begin("closing the logs")
        self.reporter.close()
        wait_for_all(self.groups)  # torchrun ends all ranks soon after the first, even the one that reports the error

    def close(self) -> None:
        """Write the profile and close the logs. A second call does nothing."""
        self.profiler.close()
        self.reporter.close(in_a_hurry=sys.exception() is not None)


def keep_from_garbage_collection() -> None:
    """Exclude the objects that exist now, most of them the libraries', from later garbage collections.

    Collections start at different times on each rank, and the other ranks wait.
    """
    gc.collect()
    gc.freeze()


def is_due(iteration: int, interval: int | None) -> bool:
    """Return whether this is one of every `interval` iterations; False without an interval."""
    return interval is not None and iteration % interval == 0
