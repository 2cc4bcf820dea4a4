"""Checkpoints whose tensors are on the nodes' own disks: ranks 0 and 1 are one node, 2 and 3 another."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import dataclasses
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llava_mcore.checkpoint.layout import iteration_folder
from llava_mcore.checkpoint.node_local import unusable_here
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.assembly import find_start
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import build_trainer
from tests.parallel.checks import join
from tests.parallel.fault_checks import save_to_a_full_disk
from tests.parallel.resume_checks import OPTIMIZERS, STEPS, configure, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer


def with_own_disk(run: RunConfig, disk: Path) -> RunConfig:
    """Save on own disks; where tensors are divided and so is the optimizer, towers are not."""
    change = {"non_persistent_save_interval": 2, "non_persistent_local_dir": disk}
    whole = run.parallel.tensor_model_parallel_size > 1 and run.parallel.use_distributed_optimizer
    return run.model_copy(
        update={
            "checkpoint": run.checkpoint.model_copy(update=change),
            "parallel": run.parallel.model_copy(update={"vision_data_parallel": "on" if whole else "off"}),
        }
    )


def saved_on_own_disks(tp: int, pp: int, checkpoint: str, save_dir: str, hf: str) -> dict[str, dict[str, Any]]:
    """Save a kept and a node-local checkpoint, resume from the latter, lose a disk, resume from the former."""
    groups = join(tp, pp)
    disk = Path(save_dir) / f"node{groups.rank // 2}"
    found = {}
    for name in OPTIMIZERS:
        run = with_own_disk(configure(name, tp, pp, checkpoint, save_dir, "local", resumes=False), disk)
        trainer = make_trainer(groups, run)
        loader = open_fake_loader(groups, trainer, run, 0)
        saver = Saver(trainer, Path(hf))
        train_steps(groups, trainer, run, loader)
        saver.save(TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), None if loader is None else loader.state())
        train_steps(groups, trainer, run, loader)
        progress = TrainingProgress(2 * STEPS, 2 * STEPS * GLOBAL_BATCH)
        state = None if loader is None else loader.state()
        saver.save(progress, state, background=True, persistent=False)
        uninterrupted = train_steps(groups, trainer, run, loader)
        saver.finish(progress.iteration)
        again = with_own_disk(configure(name, tp, pp, checkpoint, save_dir, "local", resumes=True), disk)
        start = find_start(again, groups)
        assert start.checkpoint is not None
        fresh = build_trainer(again, groups, start)
        resume(fresh)
        resumed = train_steps(groups, fresh, again, open_fake_loader(groups, fresh, again, start.iteration))
        whole = run.parallel.whole_towers
        wider = dataclasses.replace(groups, tp_size=tp + 1)
        elsewhere = [
            unusable_here(start.checkpoint, wider, vision_data_parallel=whole),
            unusable_here(start.checkpoint, groups, vision_data_parallel=not whole),
        ]
        message = save_to_a_full_disk(groups, saver, 2 * STEPS + 1, full_on=3, num_bytes=1 << 16, persistent=False)
        saver.save(TrainingProgress(3 * STEPS), state, persistent=False)
        dist.barrier(groups.control)  # every rank has deleted its older file
        found[name] = {
            "uninterrupted": uninterrupted,
            "resumed": (start.iteration, resumed),
            "elsewhere": elsewhere,
            "message": message,
            "disk": sorted(path.name for path in (disk / name).iterdir()),
        } | after_a_loss(groups, again, disk)
    return found


def after_a_loss(groups: Groups, run: RunConfig, disk: Path) -> dict[str, Any]:
    """Return where the run starts, once rank 3's file is cut short, and once it is gone."""
    found = {}
    dist.barrier(groups.control)
    (file,) = (disk / run.name).glob(f"*rank_{groups.rank:05d}.pt")
    for name in ("flipped", "short", "gone"):
        if groups.rank == 3 and name == "flipped":
            flip(file)
        if groups.rank == 3 and name == "short":
            file.write_bytes(file.read_bytes()[:-1])
        if groups.rank == 3 and name == "gone":
            file.unlink()
        start = find_start(run, groups)
        found[name] = (start.iteration, start.passed_over)
    return found | after_damage(groups, run)


def after_damage(groups: Groups, run: RunConfig) -> dict[str, Any]:
    """Return what every rank says once the kept checkpoint is damaged too, and where the run starts if none looks."""
    dist.barrier(groups.control)
    if groups.rank == 0:
        flip(next(iteration_folder(run.run_dir, STEPS).glob("__2_*.distcp")))
    dist.barrier(groups.control)
    try:
        find_start(run, groups)
        message = ""
    except LlavaMcoreError as error:
        message = str(error)
    checkpoint = run.checkpoint.model_copy(update={"skip_verification": True})
    return {
        "damaged": message,
        "not_verified": find_start(run.model_copy(update={"checkpoint": checkpoint}), groups).iteration,
    }


def flip(file: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
