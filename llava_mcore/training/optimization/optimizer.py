"""megatron-core's optimizer, from the run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.optimizer import OptimizerConfig as OptimizerSection
from llava_mcore.errors import CheckpointError, ConfigError
from llava_mcore.training.optimization.data_parallel import DataParallelModel, params_dtype
from llava_mcore.training.optimization.optimizers import OPTIMIZERS


def build_optimizer(run: RunConfig, chunks: Sequence[DataParallelModel]) -> MegatronOptimizer:
    """Build the run's optimizer, plain or distributed over data-parallel ranks."""
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
    built = get_megatron_optimizer(
        config, list(chunks), config_overrides=overrides(run, config), use_gloo_process_groups=False
    )
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
