"""The optimizer in a checkpoint. With a distributed optimizer every rank saves and loads its own slices of parameters.

megatron-core's own format that loads at any layout ("fully_reshardable") first gathers the whole state in the host
memory of every data-parallel rank. The files here have the same keys, shapes and types and differ only in where tensors
are split, so that either can load what the other has saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
)

from llava_mcore.checkpoint.flat_slices import flat_slices
from llava_mcore.checkpoint.sharded import each_layer_apart
from llava_mcore.compat.megatron.optimizer import (
    group_of,
    hand_state_to_parts,
    is_fully_sharded,
    on_this_rank,
    own_part,
    own_ranges,
    replica_of,
    set_weights_and_moments,
    weights_and_moments,
)
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.optimization.common_state import (
    CLASSES,
    allocate_state,
    chained,
    common_state,
    count_in_empty_groups,
    distributed_optimizers,
    load_common_state,
    num_updates,
)
from llava_mcore.training.optimization.muon import MuonAndAdamW
from llava_mcore.training.optimization.optimizers import kind_of

PARAM_STATE = "param_state"
SHARDING = {"param_state_sharding_type": "fully_reshardable"}  # what megatron-core reads these files as


def optimizer_state(
    optimizer: MegatronOptimizer, model: ShardedStateDict, groups: Groups, *, is_loading: bool, by_layer: bool = False
) -> ShardedStateDict:
    """Return the optimizer's state to save, or the empty state to load into; a collective call.

    Args:
        model: sharded state of all model chunks, which gives the optimizer's tensors their offset and shape.
        by_layer: some layers are trained and others are not.
    """
    model = each_layer_apart(model) if by_layer else model
    _make_moments(optimizer)
    updates = num_updates(optimizer, groups)
    distributed = distributed_optimizers(optimizer)
    if not distributed:
        return _plain_state(optimizer, model, updates)
    # Tensors to load into. Megatron-FSDP has none before its first update.
    for one in distributed:
        if is_loading or is_fully_sharded(one):
            allocate_state(one, updates)
    sharded_tensors = nested_values(extract_sharded_tensors_and_factories(model)[0])
    sharded_by_tensor = {sharded.data: sharded for sharded in sharded_tensors}
    # Of every parameter the range that this rank owns, as slices of the tensor that the model saves.
    parts = {}
    for index, (one, param, start, stop) in enumerate(_all_ranges(distributed)):
        tensors = {} if is_loading else _own_tensors(one, param)
        parts[index] = {
            name: flat_slices(
                sharded_by_tensor[param],
                start,
                stop,
                tensors.get(name),
                prefix=f"optimizer.state.{name}.",
                dtype=torch.float32,
                replica=replica_of(one),
            )
            for name in _names(one, param)
        }
    common = common_state(distributed, updates)
    return common | SHARDING | ({PARAM_STATE: parts} if parts else {})


def _all_ranges(
    optimizers: Sequence[DistributedOptimizer],
) -> Iterator[tuple[DistributedOptimizer, torch.nn.Parameter, int, int]]:
    """Yield this rank's part of every parameter, with its start and end, and the optimizer that it belongs to."""
    for one in optimizers:
        for param, start, stop in own_ranges(one):
            yield one, param, start, stop


def load_optimizer_state(optimizer: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    """Load what was read into `optimizer_state` into the optimizer."""
    distributed = distributed_optimizers(optimizer)
    if not distributed:
        for one in chained(optimizer):
            if isinstance(one, Float16OptimizerWithFloat16Params):
                _restore_empty_groups(one, loaded)
        loaded.get("optimizer", loaded).setdefault("state", {})  # this too
        optimizer.load_state_dict(loaded)
        return
    # A distributed optimizer: what all ranks have, then the slices of weights and moments.
    common = {name: value for name, value in loaded.items() if name != PARAM_STATE}
    for one in distributed:
        if isinstance(one.optimizer, HybridDeviceOptimizer):
            for group in common["optimizer"]["param_groups"]:
                group.setdefault("step", 0)  # otherwise the dummy update that allocated the state would count
                group |= {key: one.optimizer.defaults[key] for key in CLASSES}
        load_common_state(one, common)
    with torch.no_grad():
        for index, (one, param, _, _) in enumerate(_all_ranges(distributed)):
            slices = loaded[PARAM_STATE][index]
            tensors = {name: _joined(slices[name]) for name in slices}
            set_weights_and_moments(one, param, tensors)
    for one in distributed:
        inner = one.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            hand_state_to_parts(inner)
            for group in inner.param_groups:
                group.pop(
                    "step", None
                )  # otherwise every update would reset the count of its part on the GPU to this one
            _undo_update_of_weights(one)


def _undo_update_of_weights(distributed: DistributedOptimizer) -> None:
    """Set the model's weights to the loaded fp32 ones, because the dummy update that allocated the state changed
    them."""
    with torch.no_grad():
        for param, _, _ in own_ranges(distributed):
            own_part(distributed, param).copy_(weights_and_moments(distributed, param)["param"])


def _joined(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return slices end to end in one dimension; a single one, which most parameters have, is not copied."""
    flat = [tensor_slice.flatten() for tensor_slice in slices]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _restore_empty_groups(optimizer: Float16OptimizerWithFloat16Params, loaded: dict[str, Any]) -> None:
    """Put back the parameter groups without parameters on this rank: a load loses empty lists, and megatron-core pairs
    groups in their order."""
    saved = iter([group for group in loaded.get("fp32_from_fp16_params", []) if group])
    groups = optimizer.fp32_from_float16_groups
    loaded["fp32_from_fp16_params"] = [next(saved) if group else [] for group in groups]


def _plain_state(optimizer: MegatronOptimizer, model: ShardedStateDict, updates: int) -> ShardedStateDict:
    """Return the state of an optimizer that is not distributed."""
    # is_loading: creates missing moments, which a save before the first update needs as well, where megatron-core can.
    creates_state = all(one.init_state_fn is not None for one in chained(optimizer))
    state = optimizer.sharded_state_dict(model, is_loading=creates_state)
    weights = [group for group in state.pop("fp32_from_fp16_params", []) if group]
    if weights:  # empty lists, of groups without parameters on this rank, would not fit those of other ranks
        state["fp32_from_fp16_params"] = weights
    saved = state.get("optimizer", state)
    for one in chained(optimizer):
        kind = kind_of(one.optimizer)
        per_group = isinstance(one.optimizer, MuonAndAdamW) and not one.optimizer.counts_per_parameter
        if kind is not None and kind.counts_updates and not per_group:
            saved["state"]["common_step"] = torch.tensor(float(max(0, updates)))
        elif one.optimizer is not None:
            count_in_empty_groups(saved["param_groups"], one.optimizer.param_groups, updates)
    if not saved["state"]:  # nothing is trained here: an empty dictionary would not fit those of other ranks
        del saved["state"]
    return state


def _names(distributed: DistributedOptimizer, param: torch.nn.Parameter) -> tuple[str, ...]:
    inner = distributed.optimizer
    if isinstance(inner, MuonAndAdamW):
        return ("param", *inner.moments_of(group_of(distributed, param)))
    return ("param", *distributed.optimizer_state_keys)


def _make_moments(optimizer: MegatronOptimizer) -> None:
    """Create the moments of optimizers that have none before their first update: megatron-core asks for
    them."""
    for inner in (one.optimizer for one in chained(optimizer)):
        kind = kind_of(inner)
        if kind is None:
            continue
        for param in (param for group in inner.param_groups for param in group["params"]):
            if on_this_rank(param).numel() and not inner.state[param]:  # an update leaves out empty parts
                zeros = {name: torch.zeros_like(param) for name in kind.moments}
                inner.state[param] = {**({"step": torch.tensor(0.0)} if kind.counts_updates else {}), **zeros}


def _own_tensors(distributed: DistributedOptimizer, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return this rank's part of a parameter's fp32 weights and moments, flattened; moments start at zero, and may be
    in bf16."""
    local = own_part(distributed, param)
    if not distributed.config.use_precision_aware_optimizer:
        tensors = weights_and_moments(distributed, param)
    elif distributed.optimizer.state.get(local):
        tensors = _not_all_on_gpu(weights_and_moments(distributed, param), distributed.optimizer.state[local])
    else:  # it creates its state at its first update; until then there may be no room for it
        tensors = {"param": local.detach().float().cpu()}
    weights = tensors["param"]
    return {
        name: tensors[name].detach() if name in tensors else torch.zeros_like(weights)
        for name in _names(distributed, param)
    }


def _not_all_on_gpu(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return bf16 moments as they are stored, because a save converts them asynchronously. Move fp16 moments, which
    were rescaled into new tensors, to the host."""
    tensors_to_save = {}
    for name, tensor in tensors.items():
        stored = state["master_param" if name == "param" else name]
        is_kept = stored.dtype == torch.bfloat16 or stored.data_ptr() == tensor.data_ptr()
        tensors_to_save[name] = stored if is_kept else tensor.cpu()
    return tensors_to_save
