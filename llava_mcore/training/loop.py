"""The training loop."""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path

from llava_mcore.config.sections.faults import parse_ranges
from llava_mcore.data.loading.validation_data import ValidationData
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import wait_for_all
from llava_mcore.parallel.together import raise_on_all_ranks, together
from llava_mcore.training.closing import attempt
from llava_mcore.training.faults.not_finite import NotFinite
from llava_mcore.training.faults.out_of_memory import explain_out_of_memory
from llava_mcore.training.faults.skipped_samples import SkipBudget
from llava_mcore.training.faults.watchdog import Watchdog
from llava_mcore.training.fetch import Loader, Remembering, fetch_step
from llava_mcore.training.logs.reporter import Reporter
from llava_mcore.training.optimizer import learning_rates
from llava_mcore.training.profiling import IterationProfiler
from llava_mcore.training.save import Saver
from llava_mcore.training.setup import Trainer
from llava_mcore.training.state import Progress
from llava_mcore.training.step import StepResult, train_step
from llava_mcore.training.stop import StopRules, any_rank
from llava_mcore.training.validation import Validator

logger = logging.getLogger(__name__)


def train(
    trainer: Trainer,
    loader: Loader | None,
    progress: Progress,
    hf: Path,
    stop: StopRules,
    watchdog: Watchdog,
    validation: ValidationData | None = None,
) -> bool:
    """Train until the run has all its iterations, or until it is time to stop; a collective call.

    Args:
        loader: on ranks that load data.
        hf: folder with the files that travel inside checkpoints.
        validation: on ranks that load data, if the run validates.

    Returns:
        Whether the run has reached its end.
    """
    run, groups = trainer.run, trainer.groups
    iteration = _Iteration(trainer, loader, progress)
    saver = Saver(trainer, hf)
    validator = Validator(trainer, validation, watchdog)
    reporter = together(groups, lambda: Reporter(trainer, progress))
    profiler = IterationProfiler(run, groups)
    first = progress.iteration + 1
    try:
        while progress.iteration < run.training.num_iterations:
            watchdog.begin(f"iteration {progress.iteration + 1}")
            with profiler.iteration(progress.iteration + 1):
                iteration.run(reporter)
            if progress.iteration == first:
                keep_from_garbage_collection()
            asked, writing, failed = any_rank(groups, stop.due(), saver.busy, reporter.problem is not None)
            if failed:
                raise_on_all_ranks(groups, reporter.problem)
            is_last = progress.iteration == run.training.num_iterations
            if validator.due(progress.iteration) and (is_last or not asked):
                reporter.validation(validator.run(progress.iteration))  # before the save, from which a resume continues
            number, config = progress.iteration, run.checkpoint
            keep = config.saves and (is_last or asked or is_due(number, config.save_interval))
            if keep or is_due(number, config.non_persistent_save_interval):
                watchdog.begin(f"saving iteration {number}")
                in_background = config.async_save and not (is_last or asked)
                saver.save(progress, iteration.loader_state(), background=in_background, persistent=keep)
            elif saver.pending and not writing:
                saver.finish(number)
            if asked and not is_last:
                break
        raise_on_all_ranks(groups, reporter.problem)
    except LlavaMcoreError as error:
        if error.on_all_ranks:  # what has been written is not lost
            watchdog.begin("finishing a save")
            attempt("the save before", lambda: saver.finish(progress.iteration))
            watchdog.begin("closing the logs")
            reporter.close()
            wait_for_all(groups)  # torchrun ends all ranks soon after the first, also the one that will say why
        raise
    finally:
        profiler.close()
        reporter.close()
    return progress.iteration == run.training.num_iterations


def keep_from_garbage_collection() -> None:
    """Exclude the objects that exist now, all those of the libraries, from later collections: these come at
    another time on each rank, while the others wait."""
    gc.collect()
    gc.freeze()


def is_due(iteration: int, interval: int | None) -> bool:
    """Tell whether what happens every `interval` iterations happens after this one."""
    return interval is not None and iteration % interval == 0


class _Iteration:
    """Reads one global batch after the other and trains on it."""

    def __init__(self, trainer: Trainer, loader: Loader | None, progress: Progress) -> None:
        run, groups = trainer.run, trainer.groups
        self.trainer, self.progress = trainer, progress
        self.batch_sizes = run.training.batch_sizes
        self.loader = None if loader is None else Remembering(loader)
        self.budget = SkipBudget(run.data.max_skip_rate)
        self.skipped = parse_ranges(run.faults.skip_train_iteration_range)
        self.not_finite = NotFinite(run, groups)

    def loader_state(self) -> object:
        """Return the position after the last batch, on ranks that load data."""
        return None if self.loader is None else self.loader.state()

    def run(self, reporter: Reporter) -> None:
        """Go through one iteration; a collective call."""
        start = time.perf_counter()
        groups, progress = self.trainer.groups, self.progress
        size = self.batch_sizes.at(progress.consumed_samples)
        number_of_micro = size // (self.trainer.run.training.micro_batch_size * groups.dp_size)
        if self.loader is not None:
            self.loader.last.clear()
        batches, counts = fetch_step(groups, self.loader, number_of_micro, self.budget, self.trainer.fields)
        progress.consumed_conversations += counts.num_conversations
        progress.skipped_conversations += counts.num_skipped
        self.budget.check(groups, progress.consumed_conversations, progress.skipped_conversations)
        waited = time.perf_counter() - start
        number = progress.iteration + 1
        rates = learning_rates(self.trainer.run, self.trainer.scheduler)
        result: StepResult | None = None
        warning: str | None = None
        if any(number in numbers for numbers in self.skipped):
            warning = f"iteration {number}: its data were read and not trained on (--skip-train-iteration-range)"
            progress.skipped_iterations += 1
        else:
            result = self._step(number, batches, size)
            warning = self.not_finite.check(number, result, [] if self.loader is None else self.loader.last)
            progress.failed_updates += not result.updated
        progress.iteration = number
        progress.consumed_samples += size
        if warning is not None and groups.rank == 0:
            logger.warning(warning)
        reporter.step(progress, counts, result, rates=rates, waited=waited, seconds=time.perf_counter() - start)

    def _step(self, number: int, batches: list[MicroBatch], size: int) -> StepResult:
        trainer = self.trainer
        with explain_out_of_memory(trainer.run, trainer.groups, number):
            return train_step(
                trainer.groups,
                trainer.chunks,
                trainer.optimizer,
                trainer.scheduler,
                batches,
                size,
            )
