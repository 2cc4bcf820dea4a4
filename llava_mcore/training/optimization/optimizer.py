"""megatron-core's optimizer and learning-rate schedule, from the run's configuration.

A resume with other settings changes both: `follow_settings`, `rate_change`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from llava_mcore.config.rules.schedule import schedule_samples
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.optimizer import OptimizerConfig as OptimizerSection
from llava_mcore.errors import CheckpointError, ConfigError
from llava_mcore.training.optimization.common_state import chained
from llava_mcore.training.optimization.data_parallel import DataParallelModel, params_dtype
from llava_mcore.training.optimization.muon import ADAM, use_muon
from llava_mcore.training.optimization.muon_matrices import Matrix
from llava_mcore.training.optimization.optimizers import OPTIMIZERS

_FLAGS = {"vision_model": "optimizer.vision_lr=", "vision_projection": "optimizer.projection_lr="}


def build_optimizer(
    run: RunConfig, chunks: Sequence[DataParallelModel], matrices: Mapping[int, Matrix] | None = None
) -> MegatronOptimizer:
    """Build the run's optimizer, plain or distributed over data-parallel ranks.

    Args:
        matrices: what Muon updates, if the run uses it.
    """
    options, kind = run.optimizer, OPTIMIZERS[run.optimizer.name]
    # Options that the optimizer or this machine does not have.
    if run.parallel.divides_optimizer and not kind.can_be_distributed:
        raise ConfigError(f"megatron-core does not distribute {options.name}: omit --dist-optim, or choose another one")
    if options.use_precision_aware_optimizer and not HAVE_TE:
        raise ConfigError(
            "optimizer.use_precision_aware_optimizer needs the package transformer-engine: install it, or omit "
            "the option"
        )
    # The settings of every optimizer, then those of this one. Learning rates of parts are in the overrides.
    config = OptimizerConfig(
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        params_dtype=params_dtype(run),
        bf16=run.training.precision == "bf16",
        fp16=run.training.precision == "fp16",
        loss_scale=run.training.loss_scale,
        initial_loss_scale=2.0**16,
        use_distributed_optimizer=run.parallel.divides_optimizer,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        use_precision_aware_optimizer=options.use_precision_aware_optimizer,
        store_param_remainders=False,  # megatron-core 0.19 cannot load the checkpoints that it saves from this
        optimizer_cpu_offload=options.cpu_offload,
        optimizer_offload_fraction=options.cpu_offload_fraction if options.cpu_offload else 0.0,
        overlap_cpu_optimizer_d2h_h2d=options.cpu_offload,
        **kind.settings(options),
    )
    by_key = overrides(run, config)
    if matrices is not None:
        others = ParamPredicate(name="not a matrix of a linear layer", fn=lambda p: id(p) not in matrices)
        by_key[ParamKey(predicate=others)] = ParamGroupOverride(optimizer=ADAM)
    built = get_megatron_optimizer(config, list(chunks), config_overrides=by_key, use_gloo_process_groups=False)
    if matrices is not None:
        use_muon(chained(built), matrices, options)
    return built if isinstance(built, ChainedOptimizer) else ChainedOptimizer([built])  # of --fsdp it is a single one


@dataclass(frozen=True)
class Rates:
    """Highest and lowest learning rate of a part of the model."""

    max_lr: float
    min_lr: float


def part_rates(options: OptimizerSection) -> dict[str, Rates]:
    """Return the rates of every part; the ratio of lowest to highest is the same for all."""
    part_lrs = {
        "language_model": None,
        "vision_projection": options.projection_lr,
        "vision_model": options.vision_lr,
    }
    main = Rates(options.lr, options.min_lr)
    return {
        part: main if lr is None else Rates(lr, options.min_lr * (lr / options.lr)) for part, lr in part_lrs.items()
    }


def own_rates(options: OptimizerSection) -> tuple[str, ...]:
    """Return the parts with their own learning rate."""
    part_lrs = {"vision_model": options.vision_lr, "vision_projection": options.projection_lr}
    return tuple(part for part, lr in part_lrs.items() if lr is not None)


def overrides(run: RunConfig, config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return megatron-core's overrides per parameter: no weight decay for norms and biases, learning rates by part."""
    by_key = {} if run.optimizer.decay_norms_and_biases else get_standard_config_overrides(config)
    rates = part_rates(run.optimizer)
    for part in own_rates(run.optimizer):
        key = ParamKey(name=f"*module.{part}.*")
        by_key[key] = ParamGroupOverride(max_lr=rates[part].max_lr, min_lr=rates[part].min_lr)
    return by_key


def follow_settings(saved: dict[str, Any], before: OptimizerSection, now: OptimizerSection) -> None:
    """Set the current learning rates, by which megatron-core finds parameter groups, and the optimizer's settings in a
    saved state.

    Args:
        saved: the optimizer's state, changed in place.
        before: the configuration that it was saved with.

    Raises:
        CheckpointError: rates that were equal now differ: their groups cannot be distinguished.
    """
    pairs = set(zip(part_rates(before).values(), part_rates(now).values(), strict=True))
    new = dict(pairs)
    if len(new) < len(pairs):
        raise CheckpointError(
            "the checkpoint was saved with equal learning rates of several parts (--lr, optimizer.vision_lr, "
            "optimizer.projection_lr), which cannot be distinguished: make them equal again"
        )
    for group in saved.get("optimizer", saved)["param_groups"]:
        rates = new[Rates(group["max_lr"], group["min_lr"])]
        group["max_lr"], group["min_lr"] = rates.max_lr, rates.min_lr
        group |= OPTIMIZERS[now.name].group_settings(now)


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
