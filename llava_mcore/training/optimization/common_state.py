"""The part of the optimizer's state that all ranks have: parameter groups and the number of updates.

megatron-core chains two optimizers if the gradients of experts are added up over other ranks than those of the rest of
the model. A checkpoint has the parameter groups of both in one list, so that a run with one optimizer can load it.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer, param_group_identifier_keys

from llava_mcore.compat.megatron.optimizer import create_moments, is_fully_sharded
from llava_mcore.errors import CheckpointError
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.optimization.optimizers import kind_of

CLASSES = ("cpu_optimizer_cls", "gpu_optimizer_cls")
"""In the parameter groups of an optimizer on the host. A machine without Transformer Engine could not read them."""
_OF_EXPERTS = "is_expert_parallel"
"""Key of parameter groups."""


def chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that a run has."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Return the distributed optimizers that train something on this rank: one, and perhaps a second one for
    experts."""
    matches = [one for one in chained(optimizer) if isinstance(one, DistributedOptimizer) and not one.is_stub_optimizer]
    assert not matches or len(chained(optimizer)) <= 2, "megatron-core chains more optimizers for Muon and the like"
    return matches


def num_updates(optimizer: MegatronOptimizer, groups: Groups) -> int:
    """Return the number of updates, from the ranks that train something; -1 if none does. A collective call.

    torch's AdamW counts per parameter, Transformer Engine's per non-empty parameter group.
    """
    inner = [one.optimizer for one in chained(optimizer) if one.optimizer is not None]
    counts = [state["step"] for one in inner for state in one.state.values() if "step" in state]
    if not counts:
        own_groups = [group for one in inner for group in one.param_groups if group["params"]]
        counts = [group["step"] for group in own_groups if "step" in group]
    latest = torch.tensor(max(map(int, counts), default=-1))
    dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=groups.control)
    return int(latest)


def count_in_empty_groups(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]], num_updates: int) -> None:
    """Set the step of groups in which this rank trains nothing, because other ranks load rank 0's groups."""
    for group, trained in zip(saved, groups, strict=True):
        if not trained["params"] and num_updates >= 0:
            group["step"] = num_updates


def common_state(optimizers: Sequence[DistributedOptimizer], num_updates: int) -> dict[str, Any]:
    """Return the common state of distributed optimizers, to save it."""
    first, *others = [_common_state_of(one, num_updates) for one in optimizers]
    groups = [group for state in (first, *others) for group in state["optimizer"]["param_groups"]]
    without_classes = [{key: x for key, x in group.items() if key not in CLASSES} for group in groups]
    return first | {"optimizer": first["optimizer"] | {"param_groups": without_classes}}


def load_common_state(optimizer: DistributedOptimizer, saved: dict[str, Any]) -> None:
    """Load a common state into one of the optimizers, which takes the parameter groups that it has.

    Whether a group was one of experts depends on the layout that saved it.

    Raises:
        CheckpointError: the state has no such group.
    """
    keys = [key for key in param_group_identifier_keys if key != _OF_EXPERTS]
    groups = []
    for group in optimizer.optimizer.param_groups:
        alike = [x for x in saved["optimizer"]["param_groups"] if all(x.get(key) == group.get(key) for key in keys)]
        if not alike:
            raise CheckpointError("the checkpoint has no optimizer state for some of the trained parameters")
        same_kind = [x for x in alike if x[_OF_EXPERTS] == group[_OF_EXPERTS]]
        groups.append((same_kind or alike)[0] | {_OF_EXPERTS: group[_OF_EXPERTS]})
    if is_fully_sharded(optimizer):
        _set_groups(optimizer.optimizer, groups)
    else:
        optimizer.load_state_dict(saved | {"optimizer": saved["optimizer"] | {"param_groups": groups}})


def _set_groups(inner: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    """Give the parameter groups of an optimizer that has its moments the saved settings and number of updates."""
    kind = kind_of(inner)
    counts_in_state = kind is not None and kind.counts_updates
    for group, values in zip(inner.param_groups, saved, strict=True):
        group |= {key: value for key, value in values.items() if not (counts_in_state and key == "step")}
        if counts_in_state:
            for state in (inner.state[param] for param in group["params"] if inner.state.get(param)):
                state["step"] = torch.tensor(float(values["step"]))


def allocate_state(optimizer: DistributedOptimizer, num_updates: int) -> None:
    """Allocate the tensors that will be loaded."""
    if is_fully_sharded(optimizer):
        if kind_of(optimizer.optimizer) is None:  # else it has moments already
            create_moments(optimizer)
        return
    optimizer.load_state_dict(_common_state_of(optimizer, num_updates))


def _common_state_of(distributed: DistributedOptimizer, num_updates: int) -> dict[str, Any]:
    """Return a distributed optimizer's state other than that of parameters, even on a rank without parameters."""
    inner = distributed.optimizer
    is_empty = kind_of(inner) is not None and not inner.state
    if is_empty:  # megatron-core reads the step from there
        inner.state[""] = {"step": torch.tensor(float(max(0, num_updates)))}
    state: dict[str, Any] = distributed.state_dict()
    if is_empty:
        del inner.state[""]
    count_in_empty_groups(state["optimizer"]["param_groups"], inner.param_groups, num_updates)
    return state
