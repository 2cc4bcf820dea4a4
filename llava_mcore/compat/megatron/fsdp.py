"""Fully sharded data parallelism of megatron-core 0.19.2 (Megatron-FSDP), most of which has no public interface.

Import `llava_mcore.parallel` first, as for megatron.core itself.

Megatron-FSDP reads the tensor-parallel layout only to describe its tensors to a checkpoint format of its own, which is
not used here. So it is given a layout without tensor parallelism. With the real one it would give all tensor-parallel
ranks the same random numbers, and need the package einops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from llava_mcore.compat.required import replace_name, required

_SHARDS, _REPLICAS, _ONE = "shards", "replicas", "one"
"""Names of the dimensions of a mesh."""


@dataclass(frozen=True)
class MeshGroups:
    """The groups over which parameters are divided (see `ShardingGroups`), and a group of this rank alone."""

    shards: ProcessGroup
    replicas: ProcessGroup | None
    all_ranks: ProcessGroup
    expert_shards: ProcessGroup | None
    one: ProcessGroup


@dataclass(frozen=True)
class OwnShard:
    """The elements from `start` to `stop` of a flattened parameter, which this rank holds.

    `parameter`: the model's. `optimized`: what the optimizer updates in its place, a distributed tensor.
    """

    name: str
    parameter: Parameter
    optimized: Parameter
    weights: Tensor
    """In the model's precision, flat."""
    start: int
    stop: int


class ShardedModel(FullyShardedDataParallel):
    """A model whose optimizer state, gradients and parameters are divided over data-parallel ranks."""

    def __init__(
        self,
        module: MegatronModule,
        config: DistributedDataParallelConfig,
        mesh_groups: MeshGroups,
        device: torch.device,
    ) -> None:
        """Divide a model, whose parameters all ranks have whole; a collective call."""
        if device.type == "cpu":
            _use_cpu()
        self.mesh_groups, self.mesh_device = mesh_groups, device.type
        units = [TransformerLayer] if config.data_parallel_sharding_strategy == "optim_grads_params" else []
        super().__init__(module.config, config, module, fsdp_unit_modules=units, device=device)
        for shard in _all_shards(self):
            for name, mark in vars(shard.parameter).items():  # Megatron-FSDP copies only a few of them
                if isinstance(mark, bool | int) and name not in vars(shard.optimized):
                    setattr(shard.optimized, name, mark)
        self.optimized = {shard.parameter: shard.optimized for shard in _all_shards(self)}
        self.replica_rank = 0 if mesh_groups.replicas is None else mesh_groups.replicas.rank()
        self._outside_units = _outside_units(self) if units else []

    def _init_dist_index(self, pg_collection: Any) -> FSDPDistributedIndex:
        """Describe the groups of ranks (called by the base class)."""
        groups = self.mesh_groups
        self.tp_group = groups.one
        experts = groups.expert_shards
        return FSDPDistributedIndex(
            device_mesh=self._mesh(groups.shards, groups.replicas),
            dp_shard_dim=_SHARDS,
            dp_outer_dim=None if groups.replicas is None else _REPLICAS,
            tp_dim=_ONE,
            hybrid_fsdp_group=None if groups.replicas is None else groups.all_ranks,
            expt_device_mesh=None if experts is None else self._mesh(experts, None),
        )

    def _mesh(self, shards: ProcessGroup, replicas: ProcessGroup | None) -> DeviceMesh:
        """Return the device mesh of two groups that exist already, and of this rank alone."""
        local_ranks = torch.tensor(get_process_group_ranks(shards))
        if replicas is None:
            return DeviceMesh.from_group(
                [shards, self.mesh_groups.one],
                self.mesh_device,
                mesh=local_ranks[:, None].tolist(),
                mesh_dim_names=(_SHARDS, _ONE),
            )
        # Every other group of shards is this one, shifted by the distance between replicas of the same shard.
        distances = torch.tensor(get_process_group_ranks(replicas)) - torch.distributed.get_rank()
        mesh = local_ranks[None] + distances[:, None]
        return DeviceMesh.from_group(
            [replicas, shards, self.mesh_groups.one],
            self.mesh_device,
            mesh=mesh[:, :, None].tolist(),
            mesh_dim_names=(_REPLICAS, _SHARDS, _ONE),
        )

    def _annotate_tensor_parallelism(self, root_module: torch.nn.Module) -> None:
        """Do nothing: no layout is described (see the top of the file)."""

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Gather the parameters outside decoder and tower layers first, then run the model.

        Megatron-FSDP gathers a parameter before the forward pass of the module that holds it. The layers read their
        adapters directly, so no forward pass of an adapter's module would gather them.
        """
        self.use_whole_parameters()
        if self._outside_units:
            required(self.module, "all_gather_and_wait_parameters_ready")(self._outside_units, prefetch=False)
        return super().forward(*inputs, **named_inputs)

    def begin(self) -> None:
        """Prepare the first forward pass; a collective call, after the optimizer has been built.

        Weights that every rank holds whole are gathered after each update, and before the first one in the first
        forward pass. That would hang where a replica has nothing to validate and runs none, so it is done here.
        """
        if not self.divides_parameters:
            self.start_param_sync(force_sync=True)
        self.use_whole_parameters()

    def use_whole_parameters(self) -> None:
        """Put the model's own parameters in place. Megatron-FSDP puts those of the optimizer there when it divides them
        and at the end of a backward pass; an optimizer is built from these."""
        required(self.module, "_replace_param_with_raw_if_needed")()

    @property
    def divides_parameters(self) -> bool:
        """Whether a forward pass gathers parameters: then all data-parallel ranks run the same number of them."""
        return bool(self.ddp_config.data_parallel_sharding_strategy == "optim_grads_params")


def own_shards(model: ShardedModel) -> Iterator[OwnShard]:
    """Yield this rank's shard of every parameter of which it has one."""
    return (shard for shard in _all_shards(model) if shard.start < shard.stop)


def _all_shards(model: ShardedModel) -> Iterator[OwnShard]:
    buffer = model.param_and_grad_buffer
    names = required(buffer, "param_to_name")
    optimized = dict(required(buffer, "optimizer_named_parameters"))
    for group in required(buffer, "parameter_groups"):
        weights = required(group, "model_weight_buffer")
        for index, parameter in enumerate(group.params):
            start, stop = required(weights, "_get_item_slice_in_shard")(index)
            flat = required(weights, "get_item")(index, only_shard=True).detach().view(-1)
            yield OwnShard(names[parameter], parameter, optimized[names[parameter]], flat, start, stop)


def _outside_units(model: ShardedModel) -> list[Parameter]:
    """Return the parameters outside the layers whose parameters are gathered together."""
    groups: Sequence[Any] = required(model.param_and_grad_buffer, "parameter_groups")
    return [parameter for group in groups if group.fsdp_unit_id is None for parameter in group.params]


def own_gradients(model: ShardedModel, parameters: set[Parameter]) -> list[Tensor]:
    """Return what this rank has of the reduced gradients of some parameters, which may be changed in place."""
    shards = [shard for shard in own_shards(model) if shard.parameter in parameters]
    return [required(shard.optimized.grad, "_local_tensor") for shard in shards if shard.optimized.grad is not None]


class _TorchOnCpu(ModuleType):
    """A stand-in for the module torch, in which every device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: object) -> torch.device:
        """Return the CPU for any name of a device."""
        return torch.device("cpu")


def _use_cpu() -> None:
    """Let Megatron-FSDP run without a GPU: it compares its device with `torch.device("cuda:…")`, whatever it is."""
    required(mcore_fsdp_adapter, "FSDPDistributedIndex")
    if not isinstance(megatron_fsdp.torch, _TorchOnCpu):
        replace_name(megatron_fsdp, "torch", _TorchOnCpu("torch"))
