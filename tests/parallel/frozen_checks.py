"""Saving and resuming runs in which some ranks, or some layers, train nothing."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llava_mcore.checkpoint.dist import load_state
from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.errors import CheckpointError
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress, resume
from tests.helpers.fused_adam import in_place_of_torch
from tests.parallel.checks import join
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

FROZEN_MODELS: dict[str, Any] = {"model.freeze_language_model": True, "model.freeze_vision_model": True}
FIRST_STAGE: dict[str, Any] = FROZEN_MODELS
LAST_STAGE: dict[str, Any] = FROZEN_MODELS | {
    "model.freeze_vision_projection": True,
    "model.unfreeze": ("lm_head.weight", "language_model.model.norm.weight"),
}
SOME_LAYERS: dict[str, Any] = FROZEN_MODELS | {
    "model.unfreeze": ("language_model.model.layers.1.*", "language_model.model.norm.weight"),
}
FROZEN = {"first stage": FIRST_STAGE, "last stage": LAST_STAGE, "some layers": SOME_LAYERS}
DISTRIBUTED: dict[str, Any] = {"parallel.use_distributed_optimizer": True}
BF16: dict[str, Any] = {"training.precision": "bf16"}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "distributed": DISTRIBUTED,
    "distributed bf16": DISTRIBUTED | BF16,
}
AWARE: dict[str, Any] = DISTRIBUTED | BF16 | {"optimizer.use_precision_aware_optimizer": True}
OFFLOAD: dict[str, Any] = AWARE | {"optimizer.cpu_offload": True}
OFFLOAD_HALF: dict[str, Any] = OFFLOAD | {"optimizer.cpu_offload_fraction": 0.5}
GPU_KINDS = {"aware": AWARE, "offload": OFFLOAD, "offload half": OFFLOAD_HALF}
FIRST_MLP = {"model.unfreeze": ("language_model.model.layers.0.mlp.*", "language_model.model.norm.weight")}
ADAPTERS: dict[str, Any] = {"adapter.r": 4, "adapter.vision_r": 2, "adapter.targets": "q_proj,v_proj,fc1"}


@dataclass(frozen=True)
class ResumedRun:
    """A run that is saved and resumed.

    steps_before: 0 as when the first steps overflow: the optimizer has no moments yet.
    own_disk: whether the checkpoint is one on the nodes' own disks.
    """

    flags: dict[str, Any]
    steps_before: int = STEPS
    own_disk: bool = False


EMPTY_GROUPS = {
    "no norms on the first stage": ResumedRun(BF16 | FROZEN_MODELS | FIRST_MLP),
    "no tower on the last stage, own disk": ResumedRun(BF16 | {"optimizer.vision_lr": 2e-3}, own_disk=True),
    "dropout": ResumedRun(BF16 | FROZEN_MODELS | ADAPTERS | {"adapter.dropout": 0.3}),
}
"""Stages have parameter groups without parameters; with dropout, data-parallel ranks draw unequally."""


def save_and_resume(
    tp: int, pp: int, checkpoint: str, save_dir: str, hf: str, fused: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Return for each kind the losses after a checkpoint, of the run that saved it and of one that resumed.

    Args:
        fused: with an optimizer that keeps its state as Transformer Engine's does.
    """
    kinds = KINDS | (GPU_KINDS if torch.cuda.is_available() else {})
    # Either end of a pipeline alone. Elsewhere the last one stands for both; the first one is that of `no update yet`.
    parts = [part for part in FROZEN if part != "first stage" or (pp > 1 and not fused)]
    cases = {f"{part}, {kind}": ResumedRun(FROZEN[part] | kinds[kind]) for part in parts for kind in kinds}
    kinds["fp16"] = {"training.precision": "fp16"}
    cases |= {f"no update yet, {kind}": ResumedRun(FIRST_STAGE | kinds[kind], steps_before=0) for kind in kinds}
    cases |= EMPTY_GROUPS
    groups = join(tp, pp)
    with in_place_of_torch() if fused else contextlib.nullcontext():
        found = {name: _resumed(groups, checkpoint, save_dir, hf, name, case) for name, case in cases.items()}
    run = run_config(tp, pp, checkpoint, save_dir, name=next(iter(cases)))
    found["one rank's problem"] = (["missing: no.such.tensor (1,)"], [_one_rank_asks_for_more(groups, run.run_dir)])
    return found


def _resumed(
    groups: Groups, checkpoint: str, save_dir: str, hf: str, name: str, case: ResumedRun
) -> tuple[list[float], list[float]]:
    """Return the losses after a checkpoint, of the run that saved it and of one that resumed."""
    saving: dict[str, Any] = {"checkpoint.save": True, "checkpoint.save_optim": True, "checkpoint.load_optim": True}
    if case.own_disk:
        saving |= {"checkpoint.non_persistent_save_interval": 1}
        saving |= {"checkpoint.non_persistent_local_dir": f"{save_dir}/disk"}
    run = run_config(groups.tp_size, groups.pp_size, checkpoint, save_dir, name=name, **saving, **case.flags)
    trainer = make_trainer(groups, run)
    loader = open_fake_loader(groups, trainer, run, 0)
    if case.steps_before:
        train_steps(groups, trainer, run, loader)
    progress = TrainingProgress(case.steps_before, case.steps_before * GLOBAL_BATCH)
    state = None if loader is None else loader.state()
    Saver(trainer, Path(hf)).save(progress, state, persistent=not case.own_disk)
    uninterrupted = train_steps(groups, trainer, run, loader)
    again = make_trainer(groups, run)
    resume(again)
    loader = open_fake_loader(groups, again, run, case.steps_before)
    return uninterrupted, train_steps(groups, again, run, loader)


def _one_rank_asks_for_more(groups: Groups, run_dir: Path) -> str:
    """Return what this rank is told when the last one wants a tensor that the checkpoint lacks."""
    more = {"more": ShardedTensor.from_rank_offsets("no.such.tensor", torch.zeros(1))}
    try:
        load_state(more if groups.rank == groups.world_size - 1 else {}, latest_checkpoint(run_dir)[0])
    except CheckpointError as error:
        return str(error).rpartition("- ")[2]
    return "nothing"
