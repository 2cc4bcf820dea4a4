"""A start that fails on one rank of a pipeline, inside a test world: at each phase, and inside a collective call."""

from __future__ import annotations

import datetime
import io
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from llava_mcore.checkpoint import dist as dist_module
from llava_mcore.checkpoint.choose_start import start_point
from llava_mcore.errors import CheckpointError, LlavaMcoreError
from llava_mcore.parallel import together as together_module
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.together import raise_together
from llava_mcore.training import load_model, setup
from llava_mcore.training.saving import state
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import build_trainer
from tests.parallel.checks import join
from tests.parallel.training_checks import make_trainer, run_config

BEFORE = {
    "config.json": (setup, "load_hf_config"),
    "model": (setup, "build_models"),
    "weights": (dist_module, "stored_tensors"),
    "contents": (dist_module, "load_sharded_metadata"),
    "buckets": (setup, "data_parallel"),
    "run.yaml": (state, "load_run_config"),
    "rates": (state, "follow_settings"),
    "moments": (state, "load_optimizer_state"),
}
"""What fails on one rank before it does anything, by phase."""
AFTER = {
    "weights, read": (load_model, "load_weights"),
    "optimizer": (setup, "build_optimizer"),
    "state, read": (state, "load_state"),
}
"""What fails on one rank after it has done all of its collective calls."""


def start_faults(checkpoint: str, with_nan: str, save_dir: str) -> dict[str, Any]:
    """Return what each start raises on this rank, whether on all ranks, and its seconds."""
    groups = join(1, 2)
    saves = {"checkpoint.save": True, "checkpoint.save_optim": True, "checkpoint.load_optim": True, "name": "start"}
    run = run_config(1, 2, checkpoint, save_dir, **saves)
    trainer = make_trainer(groups, run)
    place = {"place": 1} if groups.loads_data else None
    save_checkpoint(trainer, TrainingProgress(1), Path(checkpoint) / "iter_0000000" / "hf", place)
    found = {}
    for phases, before in ((BEFORE, True), (AFTER, False)):
        for name, (module, function) in phases.items():
            fails = failing(vars(module)[function], name, before=before) if groups.rank == 1 else vars(module)[function]
            with mock.patch.object(module, function, fails):
                found[name] = raised(lambda: resume(build_trainer(run, groups, start_point(run))))
    other = run_config(1, 2, with_nan, f"{save_dir}/other")
    found["NaN"] = raised(lambda: build_trainer(other, groups, start_point(other)))
    found["inside a collective call"] = _alone(groups)
    return found


def failing(function: Callable[..., Any], name: str, *, before: bool) -> Callable[..., Any]:
    def fails(*args: Any, **kwargs: Any) -> Any:
        if not before:
            function(*args, **kwargs)
        raise CheckpointError(f"the {name} of this rank cannot be used")

    return fails


def raised(action: Callable[[], object]) -> tuple[str, bool, float]:
    start = time.monotonic()
    try:
        action()
    except LlavaMcoreError as error:
        return str(error), error.on_all_ranks, time.monotonic() - start
    return "", False, time.monotonic() - start


def _alone(groups: Groups) -> tuple[str, bool, float]:
    """Fail on rank 1 while rank 0 waits for it in the action; rank 1 releases it afterwards.

    Returns:
        As `raised`, with the log before the message.
    """
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("llava_mcore").addHandler(handler)

    def action() -> None:
        if groups.rank == 1:
            raise CheckpointError("rank 1 alone")
        dist.barrier(groups.control)

    with mock.patch.object(together_module, "PATIENCE", datetime.timedelta(seconds=2)):
        text, on_all_ranks, seconds = raised(lambda: raise_together(groups, action) if groups.rank == 1 else action())
    if groups.rank == 1:
        dist.barrier(groups.control)
    logging.getLogger("llava_mcore").removeHandler(handler)
    return log.getvalue() + text, on_all_ranks, seconds
