"""megatron-core's data parallelism of a model, from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from llava_mcore.compat.megatron.fsdp import MeshGroups, ShardedModel, own_gradients, own_shards
from llava_mcore.compat.megatron.gradients import gradient_ranges, reduce_in_fixed_order, scale_at_full_bandwidth
from llava_mcore.config.schema import RunConfig
from llava_mcore.models.language.experts import ExpertMatrices
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import alike, whole_name
from llava_mcore.parallel.groups import Groups, group_of_this_rank, tensor_parallel_group
from llava_mcore.parallel.replica_groups import sharding_groups
from llava_mcore.training.optimization.optimizers import DTYPES

type DataParallelModel = DistributedDataParallel | ShardedModel

_BUCKET_SIZE = 40_000_000
"""Parameters of a bucket outside the layers that are gathered whole; megatron-core's of its other data parallelism."""


def params_dtype(run: RunConfig) -> torch.dtype:
    """Return the dtype of weights and activations of a resolved run."""
    assert run.training.precision is not None, "the launcher resolves the precision"
    return DTYPES[run.training.precision]


def data_parallel(run: RunConfig, groups: Groups, model: MegatronModule, *, buckets: bool = True) -> DataParallelModel:
    """Wrap one model chunk: lower precision at its inputs and outputs, gradients reduced over data-parallel ranks.

    Args:
        buckets: reduce gradients in parts, as they become ready.
    """
    dtype = params_dtype(run)
    if run.parallel.fsdp != "none":
        return _fully_sharded(run, groups, model)
    on_gpu = groups.device.type == "cuda"
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype != torch.float32,
        use_distributed_optimizer=run.parallel.use_distributed_optimizer,
        overlap_grad_reduce=on_gpu and run.parallel.overlap_grad_reduce,
        overlap_param_gather=on_gpu and overlaps_param_gather(run),
        check_for_nan_in_grad=False,  # training/step.py checks the norm, without waiting for each bucket
    )
    inner = model if dtype == torch.float32 else Float16Module(model.config, model)
    with _own_stream() if run.model.cuda_graphs else nullcontext():
        wrapped = DistributedDataParallel(model.config, config, inner, disable_bucketing=not buckets)
    scale_at_full_bandwidth(wrapped)
    if config.overlap_grad_reduce:
        reduce_in_fixed_order(wrapped)
    return wrapped


def _fully_sharded(run: RunConfig, groups: Groups, model: MegatronModule) -> ShardedModel:
    """Wrap the model, and shard it over the data-parallel ranks as the run says."""
    dtype = params_dtype(run)
    is_half = dtype != torch.float32
    over = sharding_groups()
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=run.parallel.fsdp,
        num_distributed_optimizer_instances=run.parallel.hsdp_replicas,
        overlap_grad_reduce=True,
        overlap_param_gather=run.parallel.divides_weights,
        bucket_size=_BUCKET_SIZE,
        suggested_communication_unit_size=_communication_unit(model) if run.parallel.divides_weights else None,
        megatron_fsdp_main_params_dtype=torch.float32 if is_half else None,  # None: the weights are the main ones
        megatron_fsdp_main_grads_dtype=torch.float32,
        check_for_nan_in_grad=False,  # as above
    )
    inner = Float16Module(model.config, model) if is_half else model
    inner.config = model.config
    experts = over.expert_shards if model.config.num_moe_experts else None
    mesh_groups = MeshGroups(over.shards, over.replicas, over.all_ranks, experts, group_of_this_rank())
    return ShardedModel(inner, config, mesh_groups, groups.device)


def _communication_unit(model: MegatronModule) -> int:
    """Return how many gradients may wait to be reduced, those of two layers; half as many weights are gathered ahead.

    Megatron-FSDP's own default is a billion or more.
    """
    return 2 * max(sum(p.numel() for p in x.parameters()) for x in model.modules() if isinstance(x, TransformerLayer))


def fuse_weight_gradients(model: VisionLanguageModel, *, experts: bool) -> None:
    """Let layers add weight gradients to the fp32 sum themselves, without a copy in between. With divided weights,
    Transformer Engine's write them into the fp32 buffer that is reduced.

    The configuration's gradient_accumulation_fusion would do so too, but then megatron-core's own output layer
    demands Apex.

    Args:
        experts: also grouped products, which need a sum.
    """
    for module in model.modules():
        if isinstance(module, ExpertMatrices) and not experts:
            continue
        if vars(module).get("fuse_wgrad_accumulation") is False:
            module.fuse_wgrad_accumulation = True


@contextmanager
def _own_stream() -> Iterator[None]:
    """Run the block on a CUDA stream of its own, ordered after earlier work and before later work.

    Autograd accumulates a parameter's gradient on the stream on which the accumulation was set up, as data parallelism
    does here. Work on the default stream cannot be part of a CUDA graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def overlaps_param_gather(run: RunConfig) -> bool:
    """Return whether a run on GPUs gathers weights during the forward pass. Only a distributed optimizer shards them.

    Adapters are gathered before it: megatron-core waits for weights before the forward pass of the module that holds
    them, but layers read their adapters directly. They are small.
    """
    parallel = run.parallel
    is_enabled = parallel.overlap_grad_reduce and parallel.overlap_param_gather
    return parallel.use_distributed_optimizer and is_enabled and not run.adapter.is_on


def gathers_ahead(chunk: DataParallelModel) -> bool:
    """Return whether updated weights are gathered during the next forward pass, after which they stay whole."""
    return bool(chunk.ddp_config.overlap_param_gather) and not isinstance(chunk, ShardedModel)


def alike_here(model: VisionLanguageModel, chunk: DataParallelModel) -> dict[str, Tensor]:
    """Return this rank's values of the trained parameters that are replicated over tensor-parallel ranks, by their
    names in the whole model."""
    names = alike(model)
    if not isinstance(chunk, ShardedModel):
        return dict(names)
    parameters = set(names.values())
    return {
        whole_name(model, shard.name): shard.weights for shard in own_shards(chunk) if shard.parameter in parameters
    }


class TowerGradients:
    """Adds up the gradients of whole towers over the tensor-parallel ranks, once in a step."""

    def __init__(self, chunks: Sequence[DataParallelModel], models: Sequence[VisionLanguageModel]) -> None:
        """chunks: the wrapped `models`."""
        of_towers = {p for model in models if model.pre_process for p in model.vision_model.parameters()}
        self._parts = [self._parts_of(chunk, of_towers) for chunk in chunks]

    @staticmethod
    def _parts_of(chunk: DataParallelModel, of_towers: set[torch.nn.Parameter]) -> Callable[[], list[Tensor]]:
        """Return a function that finds this rank's gradients of the towers after a backward pass."""
        if isinstance(chunk, ShardedModel):
            return lambda: own_gradients(chunk, of_towers)
        ranges = list(gradient_ranges(chunk, of_towers))
        return lambda: ranges

    def finalize(self, chunks: list[DataParallelModel], *args: Any, **kwargs: Any) -> None:
        """Finalize gradients as megatron-core does, then add up (called by megatron-core's schedules).

        They are divided by the number of tokens before they are added up.
        """
        finalize_model_grads(chunks, *args, **kwargs)
        for gradients in (x for parts in self._parts for x in parts()):
            dist.all_reduce(gradients, group=tensor_parallel_group())
