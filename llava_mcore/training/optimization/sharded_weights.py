"""The weights of fully sharded models in a checkpoint: slices of the tensors that whole models are saved as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from llava_mcore.checkpoint.flat_slices import flat_slices
from llava_mcore.compat.megatron.fsdp import ShardedModel, own_shards
from llava_mcore.training.optimization.data_parallel import DataParallelModel


def own_weights(whole_state: ShardedStateDict, chunks: Sequence[DataParallelModel]) -> ShardedStateDict:
    """Return the slices of the weights that this rank holds, to save them.

    Args:
        whole_state: of the models with whole parameters; what it does not have is not saved.
    """
    tensors = nested_values(extract_sharded_tensors_and_factories(whole_state)[0])
    sharded_by_parameter = {sharded.data: sharded for sharded in tensors}
    weights: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        assert isinstance(chunk, ShardedModel)
        weights[f"model{index}"] = {
            shard.name: flat_slices(
                sharded_by_parameter[shard.parameter],
                shard.start,
                shard.stop,
                shard.weights,
                replica=chunk.replica_rank,
            )
            for shard in own_shards(chunk)
            if shard.parameter in sharded_by_parameter
        }
    return weights
