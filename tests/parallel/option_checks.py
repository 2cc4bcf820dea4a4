"""Training with each option of docs/parallel.md inside a test world."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress, resume
from tests.parallel.checks import join
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, TrainingRun, make_trainer, run_all, run_config

SHORT = {"training.train_iters": 2}
SEQUENCE = {"parallel.sequence_parallel": True}
FIRST = "parallel.num_layers_in_first_pipeline_stage"
LAST = "parallel.num_layers_in_last_pipeline_stage"
STAGE_1 = {"model.freeze_language_model": True, "model.freeze_vision_model": True}


@dataclass(frozen=True)
class OptionRun:
    """A run of a checkpoint, which is named. `baseline`: the run that it equals, to the bit if it is `bitwise`."""

    checkpoint: str
    flags: dict[str, Any]
    packed: bool = False
    baseline: str | None = None
    bitwise: bool = False


def curves(tp: int, pp: int, checkpoints: dict[str, str], save_dir: str) -> dict[str, dict[str, list[float]]]:
    """Train with and without each option, at one layout."""
    groups = join(tp, pp)
    save_at_other_layouts(groups, checkpoints, save_dir)
    runs = {
        name: TrainingRun(checkpoints[run.checkpoint], MIXED, SHORT | run.flags, run.packed)
        for name, run in option_runs().items()
    }
    return run_all(groups, runs, save_dir)


def option_runs() -> dict[str, OptionRun]:
    """Return all runs by name."""
    return plain_runs() | sequence_options() | recompute_options() | stage_options()


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


def plain_runs() -> dict[str, OptionRun]:
    """Return the runs that the others are compared with."""
    return {
        "llama": OptionRun("llama", {}),
        "qwen3": OptionRun("qwen3", {}),
        "qwen2 tied": OptionRun("qwen2", {}),
        "packed": OptionRun("llama", {}, packed=True),
        "gemma3 tied": OptionRun("gemma3", {}),
        "packed gemma2": OptionRun("gemma2", {}, packed=True),
        "stage 1": OptionRun("llama", STAGE_1),
    }


def varied(baseline: str, *, bitwise: bool = False, **flags: Any) -> OptionRun:
    """Return a plain run with more flags."""
    plain = plain_runs()[baseline]
    return replace(plain, flags=plain.flags | flags, baseline=baseline, bitwise=bitwise)


def sequence_options() -> dict[str, OptionRun]:
    """Return every plain run with sequence parallelism."""
    found = {f"{name} + sequence parallel": varied(name, **SEQUENCE) for name in plain_runs()}
    both = SEQUENCE | {"parallel.use_distributed_optimizer": True}
    return found | {"llama + sequence parallel, distributed optimizer": varied("llama", **both)}


def recompute_options() -> dict[str, OptionRun]:
    """Return runs with recomputation; their numbers are the very bits of the plain runs, except for the tower's."""
    full = {"model.recompute": "full"}
    two_layers = full | {"model.recompute_num_layers": 2}
    first_layer = full | {"model.recompute_method": "block"}
    parts = {"model.recompute": "selective", "model.recompute_modules": "core_attn,mlp"}
    tower = {"model.recompute": "selective", "model.recompute_vision": "full"}
    return {
        "llama + recompute full": varied("llama", bitwise=True, **two_layers),
        "llama + recompute first layer": varied("llama", bitwise=True, **first_layer),
        "packed + recompute selective": varied("packed", bitwise=True, **parts),
        "qwen3 + the tower too": varied("qwen3", **tower),
        "stage 1 + recompute full": varied("stage 1", bitwise=True, **full),
    }


def stage_options() -> dict[str, OptionRun]:
    """Return runs whose four layers are divided unevenly, or into two chunks per stage."""
    interleaved = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
    recomputed = interleaved | {"model.recompute": "full"}
    everything = recomputed | SEQUENCE | {"parallel.use_distributed_optimizer": True}
    return {
        "llama + first stage smaller": varied("llama", **{FIRST: 1}),
        "llama + last stage smaller": varied("llama", **{LAST: 1}),
        "llama + both stages given": varied("llama", **{FIRST: 3, LAST: 1}),
        "llama + interleaved": varied("llama", **interleaved),
        "packed + interleaved": varied("packed", **interleaved),
        "gemma3 tied + interleaved, recompute": varied("gemma3 tied", **recomputed),
        "qwen2 tied + interleaved": varied("qwen2 tied", **interleaved),
        "stage 1 + interleaved": varied("stage 1", **interleaved),
        "llama + interleaved, sequence parallel, recompute, distributed optimizer": varied("llama", **everything),
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
