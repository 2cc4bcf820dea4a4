"""The parts of a sharded state."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
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


def structure(state: ShardedStateDict) -> list[tuple[object, ...]]:
    """Return what a plan of a save depends on: of every part its name, dtype, shape, place and replica."""
    return [_description(x) for x in _sharded_parts(state)]


def _description(part: ShardedBase) -> tuple[object, ...]:
    place = (part.key, part.global_shape, part.global_offset, part.replica_id)
    if isinstance(part, ShardedObject):
        return place
    return (*place, part.dtype, part.local_shape, part.axis_fragmentations, part.prepend_axis_num)


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
