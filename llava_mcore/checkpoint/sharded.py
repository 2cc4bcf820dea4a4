"""The parts of a sharded state, and separate keys for layers if only some of them are saved."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base


def sharded_tensors(state: ShardedStateDict) -> list[ShardedTensor]:
    """Return the sharded tensors of a state, with factories expanded."""
    return [x for x in _sharded_parts(state) if isinstance(x, ShardedTensor)]


def num_bytes(tensor: ShardedTensor) -> int:
    """Return the bytes of a tensor as it is saved."""
    return 0 if tensor.data is None else tensor.data.numel() * tensor.dtype.itemsize


def convert_data(tensors: Sequence[ShardedTensor]) -> set[int]:
    """Convert data of another type to the type that it is saved as: moments in bf16 to fp32. The results are in host
    memory, since a GPU has no room for all of them. The host does not wait for the copies: synchronize before reading.

    Returns:
        Addresses of the storages that training may change: those of the data as it was.
    """
    live = {x.data.untyped_storage().data_ptr() for x in tensors if x.data is not None}
    for tensor in tensors:
        if tensor.data is not None and tensor.data.dtype != tensor.dtype:
            tensor.data = tensor.data.detach().to(tensor.dtype).to("cpu", non_blocking=True)
    return live


def structure(state: ShardedStateDict) -> list[tuple[object, ...]]:
    """Return what the plan of a save depends on: name, dtype, shape, place and replica of every part."""
    return [_description(x) for x in _sharded_parts(state)]


def _description(part: ShardedBase) -> tuple[object, ...]:
    place = (part.key, part.global_shape, part.global_offset, part.replica_id)
    if isinstance(part, ShardedObject):
        return place
    return (*place, part.dtype, part.local_shape, part.axis_fragmentations, part.prepend_axis_num)


def each_layer_apart(model: ShardedStateDict) -> ShardedStateDict:
    """Give every layer's tensor its own key; megatron-core stacks those of all layers under one.

    It refuses to save a stack in which only some layers are trained, because the others are missing.
    """

    def apart(sharded: Any) -> Any:
        if isinstance(sharded, ShardedTensorFactory):

            def build(*args: Any) -> Any:
                return dict_list_map_outplace(apart, sharded.build_fn(*args))

            return replace(sharded, build_fn=build)
        if not isinstance(sharded, ShardedTensor) or not sharded.prepend_axis_num:
            return sharded
        return replace(
            sharded,
            key=f"{sharded.key}.{sharded.global_offset[0]}",
            global_shape=sharded.global_shape[1:],
            global_offset=sharded.global_offset[1:],
            axis_fragmentations=None if sharded.axis_fragmentations is None else sharded.axis_fragmentations[1:],
            prepend_axis_num=0,
        )

    return dict_list_map_outplace(apart, model)


def _sharded_parts(state: ShardedStateDict) -> list[ShardedBase]:
    def unfold(value: Any) -> Any:
        return value.build() if isinstance(value, ShardedTensorFactory) else value

    # A copy of the containers: the caller's state keeps its factories.
    copied = dict_list_map_inplace(unfold, _copy_containers(state))
    return list(_flatten(extract_sharded_base(copied)[0]))


def _copy_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_containers(item) for item in value]
    return value


def _flatten(value: Any) -> list[ShardedBase]:
    if isinstance(value, dict):
        return [x for item in value.values() for x in _flatten(item)]
    if isinstance(value, list):
        return [x for item in value for x in _flatten(item)]
    return [value]
