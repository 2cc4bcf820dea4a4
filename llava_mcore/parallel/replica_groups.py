"""The groups of a model replica, which megatron-core does not build, and those of fully sharded data parallelism."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from llava_mcore.errors import ConfigError

ControlGroup = dist.ProcessGroup
"""The group for small messages between hosts (errors, stop signals, counts): always gloo, so it never uses a GPU
stream."""


def replica_groups(
    tp_size: int, cp_size: int, pp_size: int, timeout: datetime.timedelta
) -> tuple[dist.ProcessGroup | None, ControlGroup | None]:
    """Build two groups over this rank's model replica, in which no other rank takes part: one for the device, unless it
    is megatron-core's model-parallel group, and a control group, unless it is of a single rank.

    torch names such a group after its ranks and the number of groups that a rank is already in. That number differs
    between stages once megatron-core has built its groups, so these groups are built first.

    Raises:
        ConfigError: on all ranks, if some belong to no replica.
    """
    size, world_size = tp_size * cp_size * pp_size, dist.get_world_size()
    if world_size % size:
        factors = f"--tp {tp_size}{f' x --cp {cp_size}' if cp_size > 1 else ''} x --pp {pp_size}"
        raise ConfigError(
            f"{world_size} processes cannot be divided into groups of {factors} = {size}: start a multiple of {size}",
            on_all_ranks=True,
        )
    if size == 1:
        return None, None
    generator = parallel_state.RankGenerator(
        tp=tp_size, ep=1, dp=world_size // size, pp=pp_size, cp=cp_size, order="tp-cp-ep-dp-pp"
    )
    (ranks,) = (ranks for ranks in generator.get_ranks("tp-cp-pp") if dist.get_rank() in ranks)
    control: ControlGroup = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
    if cp_size == 1:
        return None, control
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True), control


@dataclass(frozen=True)
class ShardingGroups:
    """The data-parallel groups of fully sharded data parallelism.

    `shards`: ranks that divide parameters. `replicas`: those with equal shards; None if all data-parallel ranks divide
    them. `all_ranks`: both together. `expert_shards`: ranks that divide the parameters of experts.
    """

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    all_ranks: dist.ProcessGroup
    expert_shards: dist.ProcessGroup


def sharding_groups() -> ShardingGroups:
    """Return this rank's groups of fully sharded data parallelism."""
    all_ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shards = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    replicas = None
    if shards.size() < all_ranks.size():
        replicas = parallel_state.get_inter_distributed_optimizer_instance_group()
    return ShardingGroups(shards, replicas, all_ranks, parallel_state.get_expert_data_parallel_group())
