"""One training process: `torchrun … -m llava_mcore.apps.worker --config run.yaml`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore import log
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules import pad_multiple
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import LlavaMcoreError, problems
from llava_mcore.launch.process import die_with_parent

if TYPE_CHECKING:
    from llava_mcore.checkpoint.start import StartPoint
    from llava_mcore.parallel.groups import Groups

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as run.yaml says; returns 0, or 2 after a message about a user's error."""
    parser = argparse.ArgumentParser(prog="llava_mcore.apps.worker", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="resolved run.yaml")
    args = parser.parse_args(argv)
    die_with_parent(signal.SIGKILL)  # a worker without its torchrun would wait for the others for ever
    rank = int(os.environ["RANK"])
    log.set_up(rank)
    try:
        run_worker(load_run_config(args.config, [], {}))
    except LlavaMcoreError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


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


def run_worker(run: RunConfig) -> None:
    """Join the world, build everything, train."""
    # Heavy imports come after the first lines on the console.
    from llava_mcore.apps.init_folder import write_carried_folder
    from llava_mcore.checkpoint.chat_template import require_same_template
    from llava_mcore.checkpoint.start import start_point
    from llava_mcore.data.assets import Assets, load_assets
    from llava_mcore.data.loader import TrainLoader
    from llava_mcore.parallel.groups import initialise, seed_everything, shut_down
    from llava_mcore.training.determinism import make_deterministic
    from llava_mcore.training.loop import train
    from llava_mcore.training.setup import build_trainer
    from llava_mcore.training.state import Progress, resume

    if run.training.deterministic:
        make_deterministic()
    assert run.parallel.backend is not None, "run.py resolves the backend"
    groups = initialise(
        backend=run.parallel.backend,
        tensor_model_parallel_size=run.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=run.parallel.pipeline_model_parallel_size,
    )
    seed_everything(run.training.seed)
    start = together(groups, lambda: start_point(run))
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
        )
        if resuming:
            require_same_template(start.hf_dir, assets.chat.template)
        return assets

    assets = together(groups, open_assets)
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

    loader = together(groups, open_data)
    hf_source = start.hf_dir
    if run.checkpoint.saves and groups.rank == 0:
        assert assets is not None, "rank 0 loads data"
        hf_source = write_carried_folder(
            start, run.run_dir / "hf", seed=run.training.seed, chat_template=assets.chat.template
        )
    train(trainer, loader, progress, hf_source)
    if loader is not None:
        loader.close()
    shut_down()


if __name__ == "__main__":  # a checkpoint save imports this module again: keep the guard
    sys.exit(main())
