"""Process groups and this rank's position in them. The only reader of megatron-core's parallel_state."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

from llava_mcore.errors import ConfigError
from llava_mcore.files.regular import allowed_files
from llava_mcore.parallel.collectives import sum_on_hosts
from llava_mcore.parallel.replica_groups import ControlGroup, replica_groups


@dataclass(frozen=True)
class Groups:
    """This rank's coordinates and its groups.

    `agreement`: for `agree` alone. A rank that fails calls it while others may be in any other collective call; if both
    used the same group, gloo would confuse their messages and abort.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    ep_size: int
    etp_size: int
    device: torch.device
    control: ControlGroup
    agreement: ControlGroup
    """Over all ranks, for `agree` alone: what a rank sends here cannot be taken for a message of another call."""
    control_of_replica: ControlGroup | None
    """Over this rank's model replica; None for a replica of one rank."""
    data_parallel: dist.ProcessGroup
    """The ranks between which gradients are added up: replicas, and context-parallel ranks within them."""
    tensor_parallel: dist.ProcessGroup
    stage: dist.ProcessGroup
    """The tensor- and context-parallel ranks of this rank's stage."""
    pipeline_parallel: dist.ProcessGroup
    replica: dist.ProcessGroup
    """This rank's model replica: its tensor-, context- and pipeline-parallel ranks."""
    replica_source: int
    """The rank of the replica that loads data."""

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def replicas_share_experts(self) -> bool:
        """Whether experts of a layer are on ranks of several model replicas. These then run the same number of forward
        passes: a replica that runs one more would wait for the others."""
        return self.tp_size * self.cp_size % (self.ep_size * self.etp_size) != 0

    @property
    def replica_size(self) -> int:
        """Ranks of a model replica."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def control_replica(self) -> ControlGroup:
        """The control group of this rank's model replica, which has several ranks."""
        assert self.control_of_replica is not None, "a replica of one rank has nobody to talk to"
        return self.control_of_replica

    @property
    def loads_data(self) -> bool:
        """Whether this rank reads data for its model replica; one rank of each does."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == 0

    @property
    def reports_loss(self) -> bool:
        """Whether this rank has the loss of its model replica, or of its part of the tokens; one of the tensor-parallel
        ranks does."""
        return self.tp_rank == 0 and self.is_last_stage


def initialize(
    *,
    backend: str,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    context_parallel_size: int = 1,
    cp_a2a_size: int | None = None,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 1,
    sharding_replicas: int = 1,
    timeout_seconds: float = 600,
) -> Groups:
    """Join the world that torchrun describes and build megatron-core's groups.

    Args:
        cp_a2a_size: neighbors among the context-parallel ranks that have a group of their own.
        sharding_replicas: groups of data-parallel ranks that each hold all shards of the model.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    # A group of n ranks on gloo has up to n - 1 sockets per rank. It opens them when they are first needed, else all at
    # once, with n² connections.
    allowed_files()
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    # No `device_id`: with it, NCCL opens a communicator for every group at once, which takes several GiB of each GPU,
    # most of them for groups that exchange nothing.
    dist.init_process_group(backend, timeout=timeout)
    sizes = (tensor_model_parallel_size, context_parallel_size, pipeline_model_parallel_size)
    replica, control_of_replica = replica_groups(*sizes, timeout)
    of_levels = None if cp_a2a_size is None else [cp_a2a_size, context_parallel_size // cp_a2a_size]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        hierarchical_context_parallel_sizes=of_levels,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        num_distributed_optimizer_instances=sharding_replicas,
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
        create_gloo_process_groups=False,  # for a kind of optimizer checkpoint that is not used
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    agreement = dist.new_group(backend="gloo", timeout=timeout)
    groups = _groups(device, control, agreement, replica, control_of_replica)
    # Open the sockets that later calls need now, while a missing rank still is an error at the start.
    sum_over_ranks(groups, [1])
    wait_for_all(groups)
    return groups


def _groups(
    device: torch.device,
    control: ControlGroup,
    agreement: ControlGroup,
    replica: dist.ProcessGroup | None,
    control_of_replica: ControlGroup | None,
) -> Groups:
    # A replica without its own group is megatron-core's model-parallel group.
    replica = parallel_state.get_model_parallel_group() if replica is None else replica
    ranks_of_replica = dist.get_process_group_ranks(replica)
    if control_of_replica is not None:
        assert dist.get_process_group_ranks(control_of_replica) == ranks_of_replica
    return Groups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        device=device,
        control=control,
        agreement=agreement,
        control_of_replica=control_of_replica,
        data_parallel=parallel_state.get_data_parallel_group(with_context_parallel=True),
        tensor_parallel=parallel_state.get_tensor_model_parallel_group(),
        stage=tensor_and_context_parallel_group(),
        pipeline_parallel=parallel_state.get_pipeline_model_parallel_group(),
        replica=replica,
        replica_source=ranks_of_replica[0],
    )


def tensor_parallel_group() -> dist.ProcessGroup:
    """Return the group of this rank's tensor-parallel ranks."""
    return parallel_state.get_tensor_model_parallel_group()


def expert_tensor_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks that divide the matrices of an expert."""
    return parallel_state.get_expert_tensor_parallel_group()


def context_parallel_group() -> dist.ProcessGroup:
    """Return the group of this rank's context-parallel ranks."""
    return parallel_state.get_context_parallel_group()


def context_parallel_levels() -> list[dist.ProcessGroup]:
    """Return the group of this rank's neighbors that exchange heads, and that of the ranks in its place in the other
    groups of neighbors."""
    levels: list[dist.ProcessGroup] = parallel_state.get_hierarchical_context_parallel_groups()
    return levels


def tensor_and_context_parallel_group() -> dist.ProcessGroup:
    """Return the group of the tensor- and context-parallel ranks of this rank's stage."""
    return parallel_state.get_tensor_and_context_parallel_group()


def group_of_this_rank() -> dist.ProcessGroup:
    """Return a group with only this rank: tensor-parallel layers built in it are whole and do not communicate.

    It is megatron-core's context-parallel group if that has one rank, else a new one.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return group
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def set_virtual_stages(num_stages: int | None) -> None:
    """Set the number of chunks per stage, which megatron-core's schedules read; None: not interleaved."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(num_stages)


def shut_down() -> None:
    """Destroy the process groups: a rank that keeps them would make its peers wait."""
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextlib.contextmanager
def single_process() -> Iterator[Groups]:
    """Enter a world of one process without network, for conversions: the model is built at tp 1, pp 1.

    If the process is in one already (`join_alone`), that one is used and kept.
    """
    if dist.is_initialized():
        yield join_alone()
        return
    groups = join_alone()
    try:
        yield groups
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def join_alone() -> Groups:
    """Create a world of one process without network, which lasts until `shut_down`; if there is one, return its groups.

    Raises:
        ConfigError: torch.distributed is already in use.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    elif dist.get_world_size() > 1 or not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "torch.distributed is already in use in this process, and a model in one process needs its own groups: "
            "call "
            "this in another process, or after torch.distributed.destroy_process_group()"
        )
    world = dist.new_group()
    return _groups(torch.device("cpu"), world, world, None, None)


def gather_to_all[T](groups: Groups, value: T) -> list[T]:
    """Return every rank's value, in the order of the ranks; a collective call on the host."""
    gathered: list[T] = [value] * groups.world_size
    dist.all_gather_object(gathered, value, group=groups.control)
    return gathered


def gather_to_first[T](groups: Groups, value: T) -> list[T]:
    """Return every rank's value, in the order of the ranks, on rank 0, and nothing on others; a collective call on the
    host."""
    gathered: list[T] | None = [value] * groups.world_size if groups.rank == 0 else None
    dist.gather_object(value, gathered, dst=0, group=groups.control)
    return gathered or []


def wait_for_all(groups: Groups) -> None:
    """Wait until every rank is here; a collective call on the host."""
    dist.barrier(group=groups.control)


def sum_over_ranks(groups: Groups, values: Sequence[int]) -> list[int]:
    """Add counts over all ranks, on the host; ranks with nothing to count pass zeros. A collective call."""
    return [int(total) for total in sum_on_hosts(torch.tensor(values, dtype=torch.int64), groups.control)]
