"""Layers of which only some are saved: each gets keys of its own."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory


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
