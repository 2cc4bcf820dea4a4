"""The table of optimizers: how megatron-core builds each of them, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llava_mcore.config.sections.optimizer import OptimizerConfig
from llava_mcore.training.optimization.muon import MuonAndAdamW

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that megatron-core knows.

    settings: fields of megatron-core's OptimizerConfig, among them `optimizer`, its name there.
    group_settings: configuration values in its parameter groups; a resumed run sets these to its own.
    late_class: its class, if that creates the state only in the first update, although a checkpoint needs state before.
    moments: the tensors that it keeps for a parameter, of the parameter's shape, by their names in the state.
    counts_updates: whether its state has "step", the number of updates.
    can_be_distributed: whether megatron-core's distributed optimizer (`--dist-optim`) takes it.
    """

    settings: Callable[[OptimizerConfig], dict[str, Any]]
    group_settings: Callable[[OptimizerConfig], dict[str, Any]]
    late_class: type[torch.optim.Optimizer]
    moments: tuple[str, ...]
    counts_updates: bool = True
    can_be_distributed: bool = True


def _adamw_settings(options: OptimizerConfig) -> dict[str, Any]:
    return {
        "optimizer": "adam",
        "adam_beta1": options.adam_beta1,
        "adam_beta2": options.adam_beta2,
        "adam_eps": options.adam_eps,
        "exp_avg_dtype": DTYPES[options.exp_avg_dtype],
        "exp_avg_sq_dtype": DTYPES[options.exp_avg_sq_dtype],
    }


def _adamw_group_settings(options: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        settings=_adamw_settings,
        group_settings=_adamw_group_settings,
        late_class=torch.optim.AdamW,
        moments=("exp_avg", "exp_avg_sq"),
    ),
    # Built as AdamW; then the matrices get Muon. It has all of its state from the beginning.
    "muon": OptimizerKind(
        settings=_adamw_settings, group_settings=_adamw_group_settings, late_class=MuonAndAdamW, moments=()
    ),
}
"""By `optimizer.name`."""


def kind_of(optimizer: torch.optim.Optimizer | None) -> OptimizerKind | None:
    """Return the kind whose `late_class` an optimizer is; None for others, whose state megatron-core creates."""
    return next((kind for kind in OPTIMIZERS.values() if isinstance(optimizer, kind.late_class)), None)
