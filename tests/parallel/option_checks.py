"""Training with each option of docs/parallel.md inside a test world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from tests.parallel.checks import join
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_all, run_config

MIXED = {1, 4, 5, 6, 7}  # some micro-batches hold text only
SHORT = {"training.train_iters": 2}
SEQUENCE = {"parallel.sequence_parallel": True}
FIRST = "parallel.num_layers_in_first_pipeline_stage"
LAST = "parallel.num_layers_in_last_pipeline_stage"


def curves(tp: int, pp: int, checkpoints: dict[str, str], save_dir: str) -> dict[str, dict[str, list[float]]]:
    """Train with and without each option, at one layout."""
    groups = join(tp, pp)
    save_at_other_layouts(groups, checkpoints, save_dir)
    runs: dict[str, tuple[str, set[int], dict[str, Any]]] = {}
    for name, (checkpoint, flags) in (
        plain_runs() | sequence_options() | recompute_options() | stage_options()
    ).items():
        runs[name] = (checkpoints[checkpoint], MIXED, SHORT | flags)
    return run_all(groups, runs, save_dir)


def other_layouts() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return layouts that stored tensors must not show: by run name, the checkpoint and flags."""
    interleaved = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
    return {
        "saved-interleaved": ("gemma3", interleaved | SEQUENCE),
        "saved-uneven": ("llama", {FIRST: 3, LAST: 1}),
        # 401 words: 512 rows in the import, 402 here.
        "saved-narrow-vocabulary": ("llama", {"model.make_vocab_size_divisible_by": 1}),
        "saved-distributed": ("gemma2", SEQUENCE | {LAST: 1, "parallel.use_distributed_optimizer": True}),
    }


def save_at_other_layouts(groups: Groups, checkpoints: dict[str, str], save_dir: str) -> None:
    """Load imports into each layout, take steps that are too small to change a weight, and save."""
    for name, (checkpoint, flags) in other_layouts().items():
        still = {"name": name, "optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0}
        source = checkpoints[checkpoint]
        saving = {"checkpoint.save": True, "training.train_iters": 4}
        run = run_config(groups.tp_size, groups.pp_size, source, save_dir, **still, **saving, **flags)
        trainer = make_trainer(groups, run)
        train_steps(groups, trainer, run, open_fake_loader(groups, trainer, run, 0))
        save_checkpoint(
            trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), hf_folder(latest_checkpoint(Path(source))[0]), None
        )


def plain_runs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the runs that the others are compared with: their checkpoint and flags."""
    return {
        "llama": ("llama", {}),
        "qwen3": ("qwen3", {}),
        "qwen2 tied": ("qwen2", {}),
        "packed": ("llama", {}),
        "gemma3 tied": ("gemma3", {}),
        "packed gemma2": ("gemma2", {}),
        "stage 1": ("llama", {"model.freeze_language_model": True, "model.freeze_vision_model": True}),
    }


def sequence_options() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return every plain run with sequence parallelism."""
    names = {name: f"{name} + sequence parallel" for name in plain_runs()}
    found = {names[name]: (checkpoint, flags | SEQUENCE) for name, (checkpoint, flags) in plain_runs().items()}
    found["llama + sequence parallel, distributed optimizer"] = (
        "llama",
        SEQUENCE | {"parallel.use_distributed_optimizer": True},
    )
    return found


def recompute_options() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return runs with recomputation; their numbers are the very bits of the plain runs, but for the tower's."""
    full = {"model.recompute": "full", "model.recompute_num_layers": 2}
    parts = {"model.recompute": "selective", "model.recompute_modules": "core_attn,mlp"}
    return {
        "llama + recompute full": ("llama", full),
        "llama + recompute first layer": ("llama", {"model.recompute": "full", "model.recompute_method": "block"}),
        "packed + recompute selective": ("llama", parts),
        "qwen3 + the tower too": ("qwen3", {"model.recompute": "selective", "model.recompute_vision": "full"}),
        "stage 1 + recompute full": (
            "llama",
            {"model.recompute": "full", "model.freeze_language_model": True, "model.freeze_vision_model": True},
        ),
    }


def stage_options() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return runs whose four layers are divided unevenly, or into two chunks per stage."""
    first, last = {FIRST: 1}, {LAST: 1}
    interleaved = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
    return {
        "llama + first stage smaller": ("llama", first),
        "llama + last stage smaller": ("llama", last),
        "llama + both stages given": ("llama", {FIRST: 3, LAST: 1}),
        "llama + interleaved": ("llama", interleaved),
        "packed + interleaved": ("llama", interleaved),
        "gemma3 tied + interleaved, recompute": ("gemma3", interleaved | {"model.recompute": "full"}),
        "qwen2 tied + interleaved": ("qwen2", interleaved),
        "stage 1 + interleaved": (
            "llama",
            interleaved | {"model.freeze_language_model": True, "model.freeze_vision_model": True},
        ),
        "llama + interleaved, sequence parallel, recompute, distributed optimizer": (
            "llama",
            interleaved | SEQUENCE | {"model.recompute": "full", "parallel.use_distributed_optimizer": True},
        ),
    }


def resume_elsewhere(checkpoint: str, save_dir: str, hf: str) -> dict[str, tuple[list[float], list[float]]]:
    """Save from an interleaved pipeline, resume with uneven stages; return the losses and an uninterrupted run's."""
    groups = join(1, 2)
    found = {}
    for kind, distributed in (("plain", False), ("distributed", True)):
        common = {
            "checkpoint.save": True,
            "checkpoint.save_optim": True,
            "parallel.use_distributed_optimizer": distributed,
        }
        losses = {}
        for name, more in {
            "uninterrupted": {"name": f"{kind}-uninterrupted"},
            "saved": {"name": kind, "parallel.num_layers_per_virtual_pipeline_stage": 1},
            "resumed": {"name": kind, FIRST: 1, "checkpoint.load_optim": True},
        }.items():
            run = run_config(1, 2, checkpoint, save_dir, **common, **more)
            trainer = make_trainer(groups, run)
            taken = 0 if name != "resumed" else resume(trainer)[0].iteration
            loader = open_fake_loader(groups, trainer, run, taken)
            losses[name] = train_steps(groups, trainer, run, loader)
            if name == "saved":
                state = None if loader is None else loader.state()
                save_checkpoint(trainer, TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), Path(hf), state)
            if name == "uninterrupted":
                losses[name] += train_steps(groups, trainer, run, loader)
        found[kind] = (losses["saved"] + losses["resumed"], losses["uninterrupted"])
    return found
