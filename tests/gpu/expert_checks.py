"""What the ranks of the GPU tests of mixtures of experts run: Transformer Engine's layers in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.choose_start import start_point
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress, resume
from tests.gpu.graph_checks import PACKED, Curve, loader_of, train
from tests.gpu.option_checks import BF16, HALF_MOMENTS, OWN_DISK
from tests.parallel.checks import join
from tests.parallel.expert_checks import Layout, configure
from tests.parallel.frozen_checks import AWARE, OFFLOAD
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer

FP8 = {"training.fp8": True, "training.micro_batch_size": 4}  # 4 x 48 tokens: a multiple of 16 and of 2 ranks' 16
TENSORWISE = FP8 | {"training.fp8_recipe": "tensorwise"}


def kinds(save_dir: str, pp: int) -> dict[str, dict[str, Any]]:
    """Return options that hold on to the state of several optimizers, and those of FP8, by name."""
    own_disk = {"checkpoint.non_persistent_save_interval": 1, OWN_DISK: f"{save_dir}/disk"}
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "recompute": {"model.recompute": "selective"},
        "aware": AWARE,
        "half": HALF_MOMENTS,
        "offload": OFFLOAD,
        "own disk": own_disk,
        "delayed": FP8,
        "tensorwise, computed again": TENSORWISE | {"model.recompute": "selective"},
        "tensorwise, a layer in bf16": TENSORWISE | {"training.fp8_first_layers_bf16": 1},
    }
    if pp > 1:
        found["interleaved"] = {"parallel.num_layers_per_virtual_pipeline_stage": 1, "training.micro_batch_size": 1}
    return found


def save_and_resume(layout: Layout, checkpoint: str, save_dir: str, hf: str) -> dict[str, tuple[list[float], ...]]:
    """Return the losses before a save, those after it, and those after resuming it, for each option."""
    groups = join(*layout)
    found: dict[str, tuple[list[float], ...]] = {}
    for name, flags in kinds(save_dir, groups.pp_size).items():
        given = BF16 | flags | {"name": name}
        run = configure(groups, checkpoint, save_dir, **given)
        trainer = make_trainer(groups, run)
        loader = open_fake_loader(groups, trainer, run, 0)
        begun = train_steps(groups, trainer, run, loader)
        state = None if loader is None else loader.state()
        progress = TrainingProgress(STEPS, STEPS * GLOBAL_BATCH)
        Saver(trainer, Path(hf)).save(progress, state, persistent=OWN_DISK not in flags)
        uninterrupted = train_steps(groups, trainer, run, loader)
        again = configure(groups, checkpoint, save_dir, **given | {"checkpoint.load_optim": True})
        trainer, start = make_trainer(groups, again), start_point(again)
        assert start.kind == "resume" and start.checkpoint is not None
        resume(trainer)
        resumed = train_steps(groups, trainer, again, open_fake_loader(groups, trainer, again, STEPS))
        found[name] = (begun, uninterrupted, resumed)
    return found


def adapters_in_fp8(checkpoint: str, save_dir: str) -> dict[str, list[float]]:
    """Return losses of adapters on everything: in bf16, in FP8, and without a 16-bit copy of what is frozen."""
    groups = join(1, 1)
    adapter = {"adapter.r": 8, "adapter.expert_r": 4, "model.freeze_vision_model": True}
    flags = {"bf16": {}, "fp8": TENSORWISE, "only fp8": TENSORWISE | {"adapter.quantize": "fp8"}}
    found = {}
    for name, more in flags.items():
        run = configure(groups, checkpoint, save_dir, **BF16 | adapter | {"optimizer.projection_lr": None} | more)
        trainer = make_trainer(groups, run)
        found[name] = train_steps(groups, trainer, run, open_fake_loader(groups, trainer, run, 0))
    return found


def with_and_without_graphs(layout: Layout, checkpoint: str, save_dir: str) -> dict[str, dict[str, Curve]]:
    """Return losses and gradient norms of packed training, with routers' terms, without and with graphs, by
    precision."""
    groups = join(*layout)
    found: dict[str, dict[str, Curve]] = {"bf16": {}, "fp8": {}}
    for precision, more in (("bf16", {}), ("fp8", TENSORWISE)):
        for name, on in (("without", False), ("with", True)):
            flags = BF16 | PACKED | {"model.cuda_graphs": on, "router.aux_loss_coef": 0.01} | more
            trainer = make_trainer(groups, configure(groups, checkpoint, save_dir, **flags))
            assert bool(trainer.graphs) == on
            found[precision][name] = train(groups, trainer, loader_of(groups, trainer), 5)
    return found
