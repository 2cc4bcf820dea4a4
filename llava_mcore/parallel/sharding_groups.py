"""The groups of fully sharded data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class ShardingGroups:
    """The data-parallel groups of fully sharded data parallelism.

    `shards`: ranks that divide parameters. `replicas`: those with equal shards; None if all data-parallel ranks divide
    them. `whole`: both together. `expert_shards`: ranks that divide the parameters of experts.
    """

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    whole: dist.ProcessGroup
    expert_shards: dist.ProcessGroup


def sharding_groups() -> ShardingGroups:
    """Return this rank's groups of fully sharded data parallelism."""
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shards = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    replicas = None
    if shards.size() < whole.size():
        replicas = parallel_state.get_inter_distributed_optimizer_instance_group()
    return ShardingGroups(shards, replicas, whole, parallel_state.get_expert_data_parallel_group())
