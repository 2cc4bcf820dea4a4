"""Runs in a world whose memory is recorded, and runs out."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from llava_mcore.errors import TrainingError
from llava_mcore.training import loop as training_loop
from llava_mcore.training.logs.memory_timeline import timeline_of
from llava_mcore.training.memory_snapshot import owned_memory
from tests.helpers.batches import FakeLoader
from tests.parallel.checks import join
from tests.parallel.fault_checks import loop
from tests.parallel.training_checks import run_config


def memory(checkpoint: str, save_dir: str, dist_optim: bool) -> dict[str, Any]:
    """Record an iteration, then run out of memory; return what was written and said."""
    groups = join(1, 1)
    flags: dict[str, Any] = {"training.train_iters": 3, "training.micro_batch_size": 2, "training.precision": "bf16"}
    flags |= {"parallel.use_distributed_optimizer": dist_optim}
    run = run_config(1, 1, checkpoint, save_dir, **flags, **{"name": "recorded", "logging.memory_snapshot": 3})
    trainer = loop(groups, run, FakeLoader)
    result: dict[str, Any] = {}
    stem = run.run_dir / "memory" / f"rank_{groups.rank:05d}.iteration_3"
    with Path(f"{stem}.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    timeline = timeline_of(snapshot, owned_memory(trainer), torch.cuda.current_device())
    result["image"] = Path(f"{stem}.png").read_bytes()
    result["at peak"] = timeline.at(timeline.peak)
    result["categories"] = [name for name, values in timeline.amounts.items() if any(values)]
    result["events"] = len(snapshot["device_traces"][torch.cuda.current_device()])
    # What the allocator counts is what the timeline ends with.
    torch.cuda.synchronize()
    result["at end"] = sum(values[-1] for values in timeline.amounts.values())
    result["reserved"], result["torch's reserved"] = timeline.reserved, torch.cuda.memory_reserved()

    def too_much(*_arguments: Any, **_more: Any) -> None:
        torch.empty(1 << 50, device="cuda")

    run = run_config(1, 1, checkpoint, save_dir, **flags, name="too_much")
    with mock.patch.object(training_loop, "train_step", too_much):
        try:
            loop(groups, run, FakeLoader)
        except TrainingError as error:
            result["error"] = str(error)
    result["files"] = sorted(path.name for path in (run.run_dir / "memory").iterdir())
    return result
