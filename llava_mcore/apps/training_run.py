"""A training process's way from its configuration to the training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from llava_mcore.apps.init_folder import write_carried_folder
from llava_mcore.checkpoint.chat_template import require_same_template
from llava_mcore.checkpoint.local import is_local, unusable_here
from llava_mcore.checkpoint.start import StartPoint, resumes, start_point
from llava_mcore.config.rules import pad_multiple
from llava_mcore.config.schema import RunConfig
from llava_mcore.data.assets import Assets, load_assets
from llava_mcore.data.doctor.show import in_words
from llava_mcore.data.loader import TrainLoader
from llava_mcore.data.validation import ValidationData
from llava_mcore.errors import LlavaMcoreError, problems
from llava_mcore.launch.process import StopSignals
from llava_mcore.parallel.groups import Groups, agree, initialise, shut_down, wait_for_all
from llava_mcore.parallel.random import seed_everything
from llava_mcore.training.debug import ShowFirst, show_shapes_once
from llava_mcore.training.determinism import make_deterministic
from llava_mcore.training.loop import train
from llava_mcore.training.run_ids import adopt_ids
from llava_mcore.training.setup import Trainer, build_trainer
from llava_mcore.training.state import Progress, resume
from llava_mcore.training.stop import StopRules
from llava_mcore.training.watchdog import Watchdog

logger = logging.getLogger(__name__)


def run_worker(run: RunConfig, signals: StopSignals, started: float) -> bool:
    """Run under a watchdog; return whether the run has reached its end.

    Args:
        started: value of time.monotonic() from which the run's time counts.
    """
    watchdog = Watchdog(run.faults.timeout, run.run_dir / "stacks", int(os.environ["RANK"]))
    minutes = run.faults.exit_duration_in_mins
    stop = StopRules(lambda: signals.asked, None if minutes is None else started + 60 * minutes)
    try:
        finished = _run(run, stop, watchdog)
    except LlavaMcoreError:
        watchdog.close()
        raise
    watchdog.close()
    return finished


def _run(run: RunConfig, stop: StopRules, watchdog: Watchdog) -> bool:
    """Join the world, build everything, train."""
    groups = _join_world(run)
    start = find_start(run, groups)
    if start.passed_over and groups.rank == 0:
        logger.warning(problems("checkpoints that are not used", start.passed_over))
    watchdog.begin("building the model")
    trainer = together(groups, lambda: build_trainer(run, groups, start))
    resuming = resumes(run, start)
    if run.checkpoint.load_optim and start.checkpoint is not None and not resuming:
        logger.info("%s gives weights only: this run starts at iteration 0", start.checkpoint)
    assets = together(groups, lambda: _open_assets(run, groups, start, resuming))
    watchdog.begin("loading the state")
    progress, loader_states = Progress(), None
    if resuming:
        checkpoint = start.checkpoint
        assert checkpoint is not None
        progress, loader_states = together(groups, lambda: resume(trainer, checkpoint))
        if groups.rank == 0:
            adopt_ids(run.run_dir, checkpoint)
        logger.info("resumed at iteration %d of %s", progress.iteration, checkpoint)
    watchdog.begin("opening the data")
    loader = together(groups, lambda: _open_loader(run, groups, assets, loader_states))
    validation = together(groups, lambda: _open_validation(run, assets))
    shown = _show_the_first_step(trainer, loader, assets) if run.logging.debug else loader
    hf_source = start.hf_dir
    if run.checkpoint.saves and groups.rank == 0:
        assert assets is not None, "rank 0 loads data"
        hf_source = write_carried_folder(
            start, run.run_dir / "hf", seed=run.training.seed, chat_template=assets.chat.template
        )
    finished = train(trainer, shown, progress, hf_source, stop, watchdog, validation)
    if not finished:
        logger.info("stopped early, after iteration %d of %d", progress.iteration, run.training.num_iterations)
    wait_for_all(groups)  # torchrun ends all ranks soon after the first: none may go while another closes its logs
    if loader is not None:
        loader.close()
    shut_down()
    return finished


def find_start(run: RunConfig, groups: Groups) -> StartPoint:
    """Return where to start: what rank 0 finds, unless it needs tensors that a node's own disk does not hold."""
    start = decided_by_first_rank(groups, lambda: start_point(run))
    checkpoint = start.checkpoint
    if start.kind != "resume" or checkpoint is None:
        return start
    found = agree(groups, unusable_here(checkpoint, groups) if is_local(checkpoint) else None)
    if not found:
        return start
    return decided_by_first_rank(groups, lambda: start_point(run, {checkpoint: "; ".join(found)}))


def _join_world(run: RunConfig) -> Groups:
    """Meet the other ranks and seed the random numbers."""
    if run.training.deterministic:
        make_deterministic()
    assert run.parallel.backend is not None, "run.py resolves the backend"
    groups = initialise(
        backend=run.parallel.backend,
        tensor_model_parallel_size=run.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=run.parallel.pipeline_model_parallel_size,
        timeout_seconds=run.faults.timeout,
    )
    seed_everything(run.training.seed)
    return groups


def _open_assets(run: RunConfig, groups: Groups, start: StartPoint, resuming: bool) -> Assets | None:
    """Load tokenizer, template and image processor on ranks that load data."""
    if not groups.loads_data:
        return None
    assets = load_assets(
        run.checkpoint.hf_dir or start.hf_dir,
        checkpoint_hf_dir=start.hf_dir,
        chat_template=run.data.chat_template,
        lang=run.data.lang,
        image_token_id=run.data.image_token_id,
        pad_token_id=run.data.pad_token_id,
        special_tokens_in_text=run.data.special_tokens_in_text,
        limits=run.data.limits,
    )
    if resuming:
        require_same_template(start.hf_dir, assets.chat.template)
    return assets


def _open_loader(run: RunConfig, groups: Groups, assets: Assets | None, saved: Any) -> TrainLoader | None:
    """Open the data on ranks that load them, behind the saved place if there is one."""
    if assets is None:
        return None
    return TrainLoader(
        run.data,
        assets,
        micro_batch_size=run.training.micro_batch_size,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
        seed=run.training.seed,
        pad_multiple=pad_multiple(run),
        num_micro_batches=run.training.global_batch_size // (run.training.micro_batch_size * groups.dp_size),
        saved=saved,
    )


def _open_validation(run: RunConfig, assets: Assets | None) -> ValidationData | None:
    """Look at the validation part, if the run validates, on ranks that load data."""
    if assets is None or run.validation.eval_interval is None:
        return None
    iters = run.validation.eval_iters
    return ValidationData(
        run.data,
        assets,
        micro_batch_size=run.training.micro_batch_size,
        seed=run.training.seed,
        pad_multiple=pad_multiple(run),
        most_samples=None if iters is None else iters * run.training.global_batch_size,
    )


def _show_the_first_step(trainer: Trainer, loader: TrainLoader | None, assets: Assets | None) -> ShowFirst | None:
    """Let the first batch be printed in words, and the shapes that it has in the model."""
    show_shapes_once(trainer)
    return None if loader is None or assets is None else ShowFirst(loader, in_words(assets))


def together[T](groups: Groups, action: Callable[[], T]) -> T:
    """Do the same on all ranks; when it fails on any, raise one error on all of them."""
    result: list[T] = []
    problem, kind = None, LlavaMcoreError
    try:
        result.append(action())
    except LlavaMcoreError as error:
        problem, kind = str(error), type(error)
    found = agree(groups, problem)
    if not found:
        return result[0]
    texts = list(dict.fromkeys(text.partition(": ")[2] for text in found))
    raise kind(texts[0] if len(texts) == 1 else problems("the run cannot start", found), on_all_ranks=True)


def decided_by_first_rank[T](groups: Groups, action: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result: storage may look different elsewhere for a while."""
    box = [together(groups, lambda: action() if groups.rank == 0 else None)]
    dist.broadcast_object_list(box, src=0, group=groups.control)
    assert box[0] is not None
    return box[0]
