"""The learning-rate schedule of a run, and how a resume with other settings changes it."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from llava_mcore.config.rules.schedule import schedule_samples
from llava_mcore.config.schema import RunConfig
from llava_mcore.training.optimization.optimizer import own_rates, part_rates

_FLAGS = {"vision_model": "optimizer.vision_lr=", "vision_projection": "optimizer.projection_lr="}


def build_scheduler(run: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the schedule, counted in samples. It also applies each group's rates and weight decay."""
    decay = run.optimizer.weight_decay
    settings = _settings(run)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        **settings,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=settings["lr_decay_steps"],
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run may have more iterations or another rate
    )


def _settings(run: RunConfig) -> dict[str, Any]:
    """Return megatron-core's arguments that determine a learning rate, besides the samples so far."""
    options = run.optimizer
    warmup, samples, decay = schedule_samples(run.training, options)
    return {
        "max_lr": options.lr,
        "min_lr": options.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": max(1, samples),
        "lr_decay_style": options.lr_decay_style,
        "wsd_decay_steps": decay,
        "lr_wsd_decay_style": options.lr_wsd_decay_style,
    }


def learning_rates(run: RunConfig, scheduler: OptimizerParamScheduler) -> dict[str, float]:
    """Return the learning rate of each part in the next step, on every rank, whichever parts it holds."""
    return {part: scheduler.get_lr(asdict(rates)) for part, rates in part_rates(run.optimizer).items()}


def rate_change(before: RunConfig, run: RunConfig, scheduler: OptimizerParamScheduler) -> str | None:
    """Return how the settings of a resume change the next learning rate, and what keeps it; None if they do not.

    Args:
        before: the configuration that the checkpoint was saved with.
        scheduler: of `run`, at the checkpoint's samples.
    """
    if not before.training.num_iterations:  # by epochs, saved by a version that did not write their length
        return None
    # The rates of the same step in both schedules, by megatron-core's own formula.
    saved = copy.copy(scheduler)
    vars(saved).update(_settings(before))
    old, new = learning_rates(before, saved), learning_rates(run, scheduler)
    changed = [part for part in old if old[part] != new[part]]
    if not changed:
        return None
    # What differs: a longer run stretches the warm-up and the decay.
    length, was = (_settings(x)["lr_decay_steps"] for x in (run, before))
    reasons = [] if length == was else [f"the schedule has {length:,} samples instead of {was:,}"]
    earlier = before.optimizer.model_dump()
    reasons += [
        f"optimizer.{key} is {value} instead of {earlier[key]}"
        for key, value in run.optimizer.model_dump().items()
        if value != earlier[key] and (key.startswith("lr") or key.endswith("lr"))
    ]
    main = "language_model"
    part = main if main in changed else changed[0]
    of_part = "" if part == main else f" of the {part}"
    text = f"the next learning rate{of_part} is {new[part]:.4g} instead of {old[part]:.4g}: {', '.join(reasons)}"
    return f"{text}; {_how_to_keep(run, old)}"


def _how_to_keep(run: RunConfig, rates: dict[str, float]) -> str:
    """Return the flags with which a run keeps these rates, which only a constant schedule can do."""
    main = rates["language_model"]
    if main == 0:
        return "for lower ones, --lr"
    parts = [f"{_FLAGS[part]}{rates[part]:.4g}" for part in own_rates(run.optimizer)]
    flags = " ".join(["--lr-decay-style constant", f"--lr {main:.4g}", *parts])
    return f"to keep it, {flags}{' without optimizer.min_lr' if run.optimizer.min_lr else ''}"
