"""One training process: `torchrun … -m llava_mcore.apps.worker --config run.yaml`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore import log
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules import pad_multiple
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import LlavaMcoreError, problems
from llava_mcore.launch.process import STOPPED_EARLY, StopSignals, die_with_parent

if TYPE_CHECKING:
    from llava_mcore.checkpoint.start import StartPoint
    from llava_mcore.parallel.groups import Groups
    from llava_mcore.training.watchdog import Watchdog

logger = logging.getLogger("llava_mcore.apps.worker")  # __name__ is "__main__" here, whose messages nobody shows


def main(argv: Sequence[str] | None = None) -> int:
    """Train as run.yaml says; return 0, 75 if stopped early, or after a message an error's own exit code."""
    signals, started = StopSignals(), time.monotonic()
    parser = argparse.ArgumentParser(prog="llava_mcore.apps.worker", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="resolved run.yaml")
    args = parser.parse_args(argv)
    die_with_parent(signal.SIGKILL)  # a worker without its torchrun would wait for the others for ever
    rank = int(os.environ["RANK"])
    log.set_up(rank)
    try:
        finished = run_worker(load_run_config(args.config, [], {}), signals, started)
    except LlavaMcoreError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0 if finished else STOPPED_EARLY


def resumes(run: RunConfig, start: StartPoint) -> bool:
    """Tell whether to continue a run.

    The load folder is continued if it holds the optimizer of the same stage; imported weights and those of an earlier
    stage are what a run starts from, so that one command line serves the first start and every later one.
    """
    if start.kind == "resume":
        return True
    if start.kind != "load" or not run.checkpoint.load_optim or start.checkpoint is None:
        return False
    written_by = start.checkpoint / "run.yaml"
    before = load_run_config(written_by, [], {}) if written_by.is_file() else None
    if before is not None and before.checkpoint.save_optim and before.stage == run.stage:
        return True
    logger.info("%s gives weights only: this run starts at iteration 0", start.checkpoint)
    return False


def together[T](groups: Groups, action: Callable[[], T]) -> T:
    """Do the same on all ranks; when it fails on any, raise one error on all of them."""
    from llava_mcore.parallel.groups import agree

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
    import torch.distributed as dist

    box = [together(groups, lambda: action() if groups.rank == 0 else None)]
    dist.broadcast_object_list(box, src=0, group=groups.control)
    assert box[0] is not None
    return box[0]


def run_worker(run: RunConfig, signals: StopSignals, started: float) -> bool:
    """Run under a watchdog; return whether the run has reached its end.

    Args:
        started: value of time.monotonic() from which the run's time counts.
    """
    from llava_mcore.training.watchdog import Watchdog

    watchdog = Watchdog(run.faults.timeout, run.run_dir / "stacks", int(os.environ["RANK"]))
    try:
        finished = _run(run, signals, started, watchdog)
    except LlavaMcoreError:
        watchdog.close()
        raise
    watchdog.close()
    return finished


def _run(run: RunConfig, signals: StopSignals, started: float, watchdog: Watchdog) -> bool:
    """Join the world, build everything, train."""
    # Heavy imports come after the first lines on the console.
    from llava_mcore.apps.init_folder import write_carried_folder
    from llava_mcore.checkpoint.chat_template import require_same_template
    from llava_mcore.checkpoint.start import start_point
    from llava_mcore.data.assets import Assets, load_assets
    from llava_mcore.data.doctor.show import in_words
    from llava_mcore.data.loader import TrainLoader
    from llava_mcore.parallel.groups import initialise, seed_everything, shut_down
    from llava_mcore.training.debug import ShowFirst, show_shapes_once
    from llava_mcore.training.determinism import make_deterministic
    from llava_mcore.training.loop import train
    from llava_mcore.training.setup import build_trainer
    from llava_mcore.training.state import Progress, resume
    from llava_mcore.training.stop import StopRules

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
    start = decided_by_first_rank(groups, lambda: start_point(run))
    if start.passed_over and groups.rank == 0:
        logger.warning(problems("checkpoints that are not used", start.passed_over))
    watchdog.begin("building the model")
    trainer = together(groups, lambda: build_trainer(run, groups, start))
    progress, loader_states = Progress(), None
    resuming = resumes(run, start)

    def open_assets() -> Assets | None:
        if not groups.loads_data:
            return None
        assets = load_assets(
            run.checkpoint.hf_dir or start.hf_dir,
            checkpoint_hf_dir=start.hf_dir,
            chat_template=run.data.chat_template,
            lang=run.data.lang,
            image_token_id=run.data.image_token_id,
            pad_token_id=run.data.pad_token_id,
        )
        if resuming:
            require_same_template(start.hf_dir, assets.chat.template)
        return assets

    assets = together(groups, open_assets)
    watchdog.begin("loading the state")
    if resuming:
        checkpoint = start.checkpoint
        assert checkpoint is not None
        progress, loader_states = together(groups, lambda: resume(trainer, checkpoint))
        logger.info("resumed at iteration %d of %s", progress.iteration, checkpoint)

    def open_data() -> TrainLoader | None:
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
            saved=loader_states,
        )

    watchdog.begin("opening the data")
    opened = together(groups, open_data)
    loader: TrainLoader | ShowFirst | None = opened
    if run.logging.debug:
        show_shapes_once(trainer)
        if opened is not None and assets is not None:
            loader = ShowFirst(opened, in_words(assets))
    hf_source = start.hf_dir
    if run.checkpoint.saves and groups.rank == 0:
        assert assets is not None, "rank 0 loads data"
        hf_source = write_carried_folder(
            start, run.run_dir / "hf", seed=run.training.seed, chat_template=assets.chat.template
        )
    minutes = run.faults.exit_duration_in_mins
    stop = StopRules(lambda: signals.asked, None if minutes is None else started + 60 * minutes)
    finished = train(trainer, loader, progress, hf_source, stop, watchdog)
    if not finished:
        logger.info("stopped early, after iteration %d of %d", progress.iteration, run.training.train_iters)
    if loader is not None:
        loader.close()
    shut_down()
    return finished


if __name__ == "__main__":  # a checkpoint save imports this module again: keep the guard
    sys.exit(main())
