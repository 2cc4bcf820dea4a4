"""Saving in one test world and resuming in another."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import load, load_common_state_dict, load_tensors_metadata

from llava_mcore.checkpoint.dist import model_state, save_state
from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.compat.megatron.checkpoints import LoadStrategy
from llava_mcore.config.schema import RunConfig
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.optimization.optimizer_state import optimizer_state
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import FakeLoader
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

STEPS = 2
"""The first loss after a checkpoint shows its weights, the second the moments and the rate that updated them."""
OPTIMIZERS = {"plain": False, "distributed": True}


def train_steps(groups: Groups, trainer: Trainer, run: RunConfig, loader: FakeLoader | None) -> list[float]:
    """Train STEPS steps and return their losses."""
    number = GLOBAL_BATCH // (run.training.micro_batch_size * groups.dp_size)
    losses = []
    for _ in range(STEPS):
        batches, *_ = fetch_step(groups, loader, number, SkipBudget(0.0), trainer.fields)
        result = train_step(
            groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH
        ).result()
        losses.append(result.loss)
    return losses


def open_fake_loader(groups: Groups, trainer: Trainer, run: RunConfig, steps_taken: int) -> FakeLoader | None:
    """Return the loader after so many steps, on ranks that load data."""
    if not groups.loads_data:
        return None
    size = run.training.micro_batch_size
    loader = FakeLoader(
        trainer.hf, micro_batch_size=size, dp_rank=groups.dp_rank, dp_size=groups.dp_size, text_only={1, 3}
    )
    loader.restore(steps_taken * GLOBAL_BATCH // (size * groups.dp_size))
    return loader


def configure(name: str, tp: int, pp: int, checkpoint: str, save_dir: str, impl: str, *, resumes: bool) -> RunConfig:
    flags: dict[str, Any] = {
        "name": name,
        "checkpoint.save": True,
        "checkpoint.save_optim": True,
        "checkpoint.load_optim": resumes,
        "parallel.use_distributed_optimizer": OPTIMIZERS[name],
        "model.transformer_impl": impl,
        "optimizer.vision_lr": 2e-3,
        "optimizer.min_lr": 1e-4,
        "training.precision": "bf16" if torch.cuda.is_available() else "fp32",
    }
    return run_config(tp, pp, checkpoint, save_dir, **flags)


def train_and_save(
    tp: int, pp: int, checkpoint: str, save_dir: str, hf: str, impl: str = "local"
) -> dict[str, list[float]]:
    """Train, save, train on; return the losses after the save, for each kind of optimizer."""
    groups = join(tp, pp)
    found = {}
    for name in OPTIMIZERS:
        run = configure(name, tp, pp, checkpoint, save_dir, impl, resumes=False)
        trainer = make_trainer(groups, run)
        loader = open_fake_loader(groups, trainer, run, 0)
        if OPTIMIZERS[name]:  # as after a first update that fp16's loss scaler has skipped
            optimizer_state(trainer.optimizer, model_state(trainer.models, is_loading=False), groups, is_loading=False)
        train_steps(groups, trainer, run, loader)
        state = None if loader is None else loader.state()
        save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
        if OPTIMIZERS[name] and not torch.cuda.is_available():
            check_files(trainer, run.run_dir)
        found[name] = train_steps(groups, trainer, run, loader)
    return found


def check_files(trainer: Trainer, run_dir: Path) -> None:
    """A distributed optimizer is saved as megatron-core's own, gathering form has it, so that either loads the other's.

    Every byte is written by one rank, also those that all data-parallel ranks hold.
    """
    ours, theirs = latest_checkpoint(run_dir)[0], run_dir / "megatron-core"
    theirs.mkdir(exist_ok=True)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    optimizer = trainer.optimizer.sharded_state_dict(
        model_state(trainer.models, is_loading=False)["model0"], metadata=metadata
    )
    save_state({"optimizer": optimizer}, theirs)
    dist.barrier()
    saved = tensors_in(ours)
    expected, found = tensors_in(theirs), {name: x for name, x in saved.items() if name.startswith("optimizer.")}
    assert expected and found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    common = load_common_state_dict(str(ours))["optimizer"]
    assert repr(common) == repr(load_common_state_dict(str(theirs))["optimizer"])
    num_bytes = sum(file.stat().st_size for file in ours.glob("*.distcp"))
    content = sum(tensor.nbytes for tensor in saved.values())
    assert content < num_bytes < 1.2 * content


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a checkpoint."""
    tensors = load_tensors_metadata(str(checkpoint), LoadStrategy())
    everything = load(tensors, str(checkpoint), LoadStrategy(), validate_access_integrity=False)
    return {name: value for name, value in everything.items() if isinstance(value, torch.Tensor)}


def check_changed_rates(groups: Groups, run: RunConfig) -> None:
    """A resumed run's parameters get the rates that it is given, not those that it was saved with."""
    changed = run.optimizer.model_copy(update={"lr": 5e-4, "vision_lr": 7e-3, "min_lr": 0.0, "lr_warmup_fraction": 0.0})
    again = run.model_copy(update={"optimizer": changed.model_copy(update={"lr_decay_style": "constant"})})
    trainer = make_trainer(groups, again)
    resume(trainer)
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {5e-4, 7e-3}


def resume_and_train(tp: int, pp: int, checkpoint: str, save_dir: str, impl: str = "local") -> dict[str, list[float]]:
    """Resume what `train_and_save` saved and return the losses from there on."""
    groups = join(tp, pp)
    found = {}
    for name in OPTIMIZERS:
        run = configure(name, tp, pp, checkpoint, save_dir, impl, resumes=True)
        trainer = make_trainer(groups, run)
        progress, states = resume(trainer)
        assert progress.iteration == STEPS and (states is not None) == groups.loads_data
        loader = open_fake_loader(groups, trainer, run, STEPS)
        found[name] = train_steps(groups, trainer, run, loader)
        if pp > 1:
            check_changed_rates(groups, run)
    return found
