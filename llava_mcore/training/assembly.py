"""Assembly of a training process: from a run's configuration to its training loop, and the end of it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llava_mcore.adapters.adaptation import base_of
from llava_mcore.adapters.adapter_record import holds_adapters
from llava_mcore.check_data.show import in_words
from llava_mcore.checkpoint.choose_start import StartPoint, resumes, start_point, unread_start
from llava_mcore.checkpoint.node_local import is_local, unusable_here
from llava_mcore.checkpoint.verify import damage_found_together
from llava_mcore.config.rules.all_rules import data_to_read, loader_multiple, pad_multiple
from llava_mcore.config.schema import RunConfig
from llava_mcore.data.encode.assets import Assets, require_same_tokenizer
from llava_mcore.data.encode.chat_template import require_same_template
from llava_mcore.data.loader.source import noticing_killed_loaders
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.loader.validation_data import ValidationData
from llava_mcore.data.storage.dataset_path import VALIDATION
from llava_mcore.errors import CheckpointError, LlavaMcoreError, problems
from llava_mcore.inference.generation.questions import Questions
from llava_mcore.log import warn_on_failure
from llava_mcore.parallel.agreement import agree
from llava_mcore.parallel.groups import Groups, shut_down, wait_for_all
from llava_mcore.parallel.together import decided_by_first_rank, on_first_rank, raise_together
from llava_mcore.processes.control import StopSignals
from llava_mcore.processes.watchdog import Watchdog
from llava_mcore.training.answers.answerer import AnswerData, Answerer
from llava_mcore.training.assets import run_assets
from llava_mcore.training.diagnostics import IterationProfiler, ShowFirst, show_shapes_once
from llava_mcore.training.fetch import shared_names
from llava_mcore.training.iterations import Iterations
from llava_mcore.training.logs.reporter import Reporter, StartTimes
from llava_mcore.training.logs.run_record import adopt_ids
from llava_mcore.training.loop import StopRules, TrainingLoop
from llava_mcore.training.memory_snapshot import MemoryRecorder
from llava_mcore.training.saving.hf_files import carried_files
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer, build_trainer, join_world
from llava_mcore.training.validation import Validator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def assembled(run: RunConfig, signals: StopSignals, started: float) -> Iterator[TrainingLoop]:
    """Assemble the training loop of a run, and shut it down after the block unless that failed.

    A watchdog ends the process if any step of the assembly takes too long.

    Args:
        started: value of time.monotonic() from which the run's time counts.
    """
    watchdog = Watchdog(run.faults.timeout, run.run_dir, int(os.environ["RANK"]))
    signals.on_terminate = watchdog.write_stacks  # another rank may have failed
    minutes = run.faults.exit_duration_in_mins
    stop = StopRules(lambda: signals.asked, None if minutes is None else started + 60 * minutes)
    try:
        with noticing_killed_loaders(run.data.path):
            loop, loader = _assemble(run, stop, watchdog)
            yield loop
            _end(loop, loader)
    except (LlavaMcoreError, OSError, KeyboardInterrupt):
        warn_on_failure("removing the file for stacks", watchdog.close)
        raise
    warn_on_failure("removing the file for stacks", watchdog.close)


def _assemble(run: RunConfig, stop: StopRules, watchdog: Watchdog) -> tuple[TrainingLoop, TrainLoader | None]:
    """Join the world and build the training loop; return also the loader, on ranks that load data."""
    times = StartTimes()

    def begin(phase: str) -> None:
        watchdog.begin(phase)
        times.begin(phase)

    # This rank's place among the others determines its part of the model and of the data.
    begin("connecting")
    groups = join_world(run)

    # All ranks start from the same checkpoint, even while storage looks different to some of them.
    begin("choosing a checkpoint")
    start = find_start(run, groups, watchdog.begin)
    on_first_rank(groups, lambda: _warn_of_unread_start(run, start))

    # The model with the weights of that checkpoint, its optimizer and its schedule.
    trainer = build_trainer(run, groups, start, begin)
    resuming = raise_together(groups, lambda: resumes(run, start))
    if run.checkpoint.load_optim and start.checkpoint is not None and not resuming:
        logger.info("%s provides only weights: this run starts at iteration 0", start.checkpoint)

    begin("loading the tokenizer")
    assets = raise_together(groups, lambda: _open_assets(run, groups, start, resuming))

    # A resumed run has the rest too: optimizer, schedule, counters, random states, the position in the data.
    begin("loading the state")
    progress, loader_states = _resume_from(trainer, start) if resuming else (TrainingProgress(), None)

    # Data for training, validation and answers, on the rank of each replica that reads it.
    begin("opening the data")
    loader = raise_together(groups, lambda: _open_loader(run, groups, assets, loader_states))
    validation = raise_together(groups, lambda: _open_validation(run, assets))
    answers = raise_together(groups, lambda: _open_answers(run, assets))
    shown_loader = _show_first_step(trainer, loader, assets) if run.logging.debug else loader
    hf_dir = raise_together(groups, lambda: carried_files(run, groups, start, assets))
    reporter = raise_together(groups, lambda: Reporter(trainer, progress, times))
    loop = TrainingLoop(
        trainer,
        progress,
        iterations=Iterations(trainer, shown_loader, progress, reporter),
        reporter=reporter,
        saver=Saver(trainer, hf_dir),
        validator=Validator(trainer, validation, watchdog),
        answerer=raise_together(groups, lambda: Answerer(trainer, answers, hf_dir, watchdog)),
        profiler=IterationProfiler(run, groups),
        memory=MemoryRecorder(trainer),
        stop=stop,
        watchdog=watchdog,
        times=times,
        dataset_names=shared_names(groups, [] if loader is None else loader.dataset_names),
    )
    return loop, loader


def _resume_from(trainer: Trainer, start: StartPoint) -> tuple[TrainingProgress, Sequence[Any] | None]:
    """Load the rest of the state of a resumed run; return its progress and the positions in the data."""
    run, checkpoint = trainer.run, start.checkpoint
    assert checkpoint is not None
    progress, loader_states = resume(trainer)
    on_first_rank(trainer.groups, lambda: adopt_ids(run.run_dir, checkpoint))
    logger.info("resumed at iteration %d of %s", progress.iteration, checkpoint)
    if run.training.fraction_done(progress.iteration, progress.num_read) >= 1:  # a run by epochs knows it only now
        _say_completion(run, start)
    return progress, loader_states


def _say_completion(run: RunConfig, start: StartPoint) -> None:
    """Log that nothing is left to train. CheckpointError if the checkpoint is the end of another run, since this one
    has not begun."""
    reached = (
        f"{start.checkpoint} has read all {run.training.samples_to_read} samples; to continue, raise --train-epochs, "
        "which counts the whole run"
    )
    if start.kind == "load":
        omit = "or omit --load-optim the first time, to start a new run with its weights"
        raise CheckpointError(f"{reached}, {omit}", on_all_ranks=True)
    logger.info("the run is complete: %s", reached)


def _end(loop: TrainingLoop, loader: TrainLoader | None) -> None:
    """Say how the run has ended, and end the loader processes, graphs and process groups; a collective call."""
    run = loop.config
    if not loop.is_complete:
        logger.info("stopped early, after iteration %d of %d", loop.progress.iteration, run.training.num_iterations)
    if run.checkpoint.unsaved is not None:
        logger.warning("the run has ended: %s", run.checkpoint.unsaved)
    wait_for_all(loop.groups)  # torchrun ends all ranks soon after the first: none may exit before logs are closed
    if loader is not None:
        warn_on_failure("ending the loader processes", loader.close)
    for graphs in loop.trainer.graphs:
        graphs.close()
    shut_down()


def _warn_of_unread_start(run: RunConfig, start: StartPoint) -> None:
    """Log which newer checkpoints, and which --megatron-load-dir, are not used."""
    if start.passed_over:
        logger.warning(problems("checkpoints that are not used", start.passed_over))
    unread = unread_start(run, start)
    if unread is not None:
        logger.warning(unread)


def find_start(run: RunConfig, groups: Groups, begin: Callable[[str], None] = lambda _: None) -> StartPoint:
    """Return where to start: the newest checkpoint that is complete, undamaged and, if node-local, on the nodes' disks.

    Args:
        begin: called with the name of each task: reading files may take as long as loading them.

    Raises:
        CheckpointError: on all ranks, if there are checkpoints but none can be used.
    """
    unusable: dict[Path, str] = {}
    damaged: dict[Path, str] = {}
    while True:
        # The newest checkpoint that has not been ruled out.
        start = decided_by_first_rank(groups, lambda: start_point(run, unusable, damaged))
        checkpoint = start.checkpoint
        if checkpoint is None:
            return start
        # Is each node's part of it on its disk? Other storage is the same for all nodes.
        begin(f"verifying {checkpoint}")
        verify = not run.checkpoint.skip_verification
        if start.kind == "resume" and is_local(checkpoint):
            replicates_tower = run.parallel.whole_towers
            problem = unusable_here(checkpoint, groups, verify=verify, vision_data_parallel=replicates_tower)
            messages = agree(groups, problem)
            if messages:
                unusable[checkpoint] = "; ".join(messages)
                continue
        # The ranks divide its files to compare their checksums. A damaged checkpoint is no candidate any more.
        problem = damage_found_together(groups, checkpoint) if verify else None
        if problem is None:
            if verify and holds_adapters(checkpoint):
                _verify_base(run, groups, checkpoint)
            return start
        damaged[checkpoint] = problem


def _verify_base(run: RunConfig, groups: Groups, checkpoint: Path) -> None:
    """Raise CheckpointError on all ranks if the base model of an adapter is missing, damaged, or a different one."""
    base = decided_by_first_rank(groups, lambda: base_of(checkpoint, run.checkpoint.load).folder)
    problem = damage_found_together(groups, base)
    if problem is not None:
        raise CheckpointError(f"{base}: {problem}", on_all_ranks=True)


def _open_assets(run: RunConfig, groups: Groups, start: StartPoint, resuming: bool) -> Assets | None:
    """Load tokenizer, template and image processor on ranks that load data."""
    if not groups.loads_data:
        return None
    assets = run_assets(run, start.hf_dir)
    if resuming:
        if run.checkpoint.hf_dir is not None:
            require_same_tokenizer(start.hf_dir, run.checkpoint.hf_dir)
        require_same_template(start.hf_dir, assets.chat.template)
    return assets


def _open_loader(run: RunConfig, groups: Groups, assets: Assets | None, saved: Any) -> TrainLoader | None:
    """Open the data on ranks that load it, after the saved position if there is one."""
    if assets is None:
        return None
    return TrainLoader(
        data_to_read(run),
        assets,
        micro_batch_size=run.training.micro_batch_size,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
        seed=run.training.seed,
        pad_multiple=loader_multiple(run),
        num_micro_batches=run.training.global_batch_size // (run.training.micro_batch_size * groups.dp_size),
        batch_sizes=run.training.batch_sizes,
        saved=saved,
    )


def _open_validation(run: RunConfig, assets: Assets | None) -> ValidationData | None:
    """Open the validation split on ranks that load data, if the run validates."""
    if assets is None or run.validation.eval_interval is None:
        return None
    iters = run.validation.eval_iters
    return ValidationData(
        data_to_read(run),
        assets,
        micro_batch_size=run.training.micro_batch_size,
        seed=run.training.seed,
        pad_multiple=pad_multiple(run),
        most_samples=None if iters is None else iters * run.training.global_batch_size,
    )


def _open_answers(run: RunConfig, assets: Assets | None) -> AnswerData | None:
    """Open the questions of the validation split on ranks that load data, if the run asks them."""
    if assets is None or run.validation.eval_generate is None:
        return None
    assert run.data.path is not None
    seed, samples = run.training.seed, run.validation.eval_generate_samples
    return AnswerData(assets, Questions(run.data.path, assets, split=VALIDATION, seed=seed, most_samples=samples))


def _show_first_step(trainer: Trainer, loader: TrainLoader | None, assets: Assets | None) -> ShowFirst | None:
    """Print the first batch as text, and the shapes in the model's first forward pass."""
    show_shapes_once(trainer)
    return None if loader is None or assets is None else ShowFirst(loader, in_words(assets))
