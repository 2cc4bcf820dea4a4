"""Parts of megatron-core 0.19.2's optimizers that have no public interface.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from llava_mcore.compat.megatron.fsdp import OwnShard, ShardedModel, own_shards
from llava_mcore.compat.required import replace_name, required


class _RefusedUpdateError(Exception):
    """Carries the gradient norm of a step whose update is refused."""

    def __init__(self, grad_norm: float) -> None:
        super().__init__(grad_norm)
        self.grad_norm = grad_norm


def update_unless(optimizer: MegatronOptimizer, refused: Callable[[float], bool]) -> tuple[bool, float]:
    """Run optimizer.step() up to the gradient norm and, unless the norm is refused, to its end.

    `step` calls a method for the norm before it changes anything.

    Returns:
        Whether the weights changed, and the norm (0 if fp16's loss scaler found an overflow before it was taken).

    Raises:
        AttributeError: `step` has changed weights without calling that method.
    """
    # `step` is given a method for the norm that raises an exception where the norm is refused.
    assert isinstance(optimizer, ChainedOptimizer), "megatron-core's, whose step asks for the norm by this method"
    take_norm = required(optimizer, "get_grad_norm")
    on_host: float | None = None

    def checked() -> Tensor | float | None:
        nonlocal on_host
        norm: Tensor | float | None = take_norm()
        on_host = 0.0 if norm is None else float(norm)
        if refused(on_host):
            raise _RefusedUpdateError(on_host)
        return norm  # as it is: a tensor divides in fp32, a float in float64, and clipped gradients would differ

    # The update. The method is replaced on this object only, and for this call.
    replace_name(optimizer, "get_grad_norm", checked)
    try:
        updated, _, _ = optimizer.step()  # its norm is the same; to read it again would wait for the update
    except _RefusedUpdateError as error:
        return False, error.grad_norm
    finally:
        del optimizer.get_grad_norm
    # A version that does not call the method would update without the check.
    if updated and on_host is None:
        raise AttributeError(
            f"{type(optimizer).__qualname__}.step no longer calls get_grad_norm: gradients that are not finite would "
            "reach the weights; install a version of megatron-core that pyproject.toml allows"
        )
    return bool(updated), 0.0 if on_host is None else on_host


def own_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[Parameter, int, int]]:
    """Yield every parameter of which this rank holds a part, with the part's start and end (exclusive)."""
    if is_fully_sharded(optimizer):
        yield from ((shard.parameter, shard.start, shard.stop) for shard in _trained_shards(optimizer))
        return
    for ranges_by_type in required(optimizer, "gbuf_ranges"):
        for buckets in ranges_by_type.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, ranges["param"].start, ranges["param"].end


def is_fully_sharded(optimizer: DistributedOptimizer) -> bool:
    """Return whether the optimizer's parameters are distributed tensors of fully sharded data parallelism."""
    return bool(required(optimizer, "ddp_config").use_megatron_fsdp)


def _trained_shards(optimizer: DistributedOptimizer) -> Iterator[OwnShard]:
    chunks: list[ShardedModel] = required(optimizer, "model_chunks")
    return (shard for chunk in chunks for shard in own_shards(chunk) if shard.parameter.requires_grad)


def replica_of(optimizer: DistributedOptimizer) -> int:
    """Return the number of this rank among the data-parallel ranks that hold the same parts."""
    return required(optimizer, "model_chunks")[0].replica_rank if is_fully_sharded(optimizer) else 0


def own_part(optimizer: DistributedOptimizer, param: Parameter) -> Parameter:
    """Return this rank's part of a parameter, which the inner optimizer updates."""
    if is_fully_sharded(optimizer):
        return required(optimizer, "model_chunks")[0].optimized[param]
    group, index = required(optimizer, "model_param_group_index_map")[param]
    return optimizer.optimizer.param_groups[group]["params"][index]


def group_of(optimizer: DistributedOptimizer, param: Parameter) -> dict[str, Any]:
    """Return the parameter group of a parameter."""
    group, _ = required(optimizer, "model_param_group_index_map")[param]
    settings: dict[str, Any] = optimizer.optimizer.param_groups[group]
    return settings


def on_this_rank(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, which may be distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weights_and_moments(optimizer: DistributedOptimizer, param: Parameter) -> dict[str, Tensor]:
    """Return this rank's part of a parameter's fp32 weights ("param") and moments, flattened."""
    if is_fully_sharded(optimizer):
        part = own_part(optimizer, param)
        state = optimizer.optimizer.state[part]
        tensors = {"param": part, **{name: state[name] for name in optimizer.optimizer_state_keys}}
        return {name: on_this_rank(x.detach()).view(-1) for name, x in tensors.items()}
    return required(optimizer, "_get_main_param_and_optimizer_states")(param)


def set_weights_and_moments(optimizer: DistributedOptimizer, param: Parameter, tensors: dict[str, Tensor]) -> None:
    """Inverse of `weights_and_moments`."""
    if is_fully_sharded(optimizer):
        for name, local in weights_and_moments(optimizer, param).items():
            local.copy_(tensors[name])
        return
    required(optimizer, "_set_main_param_and_optimizer_states")(param, tensors)


def create_moments(optimizer: DistributedOptimizer) -> None:
    """Create the moments of a fully sharded optimizer that has had no update."""
    create = required(optimizer, "init_state_fn")
    create(optimizer.optimizer, optimizer.config)


def hand_state_to_parts(optimizer: HybridDeviceOptimizer) -> None:
    """Pass the loaded state of an offloaded optimizer on to its parts on the GPU and on the host."""
    sync: Any = required(optimizer, "_sync_hdo_state_to_sub_optimizers")
    sync()


def updated_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[Parameter, Parameter, int, int]]:
    """Yield every parameter of which this rank updates a part, what the inner optimizer updates in its place (an fp32
    copy, or a flat part), and the part's start and end."""
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, start, stop in own_ranges(optimizer):
            yield parameter, own_part(optimizer, parameter), start, stop
        return
    pairs = [(x, x) for group in (optimizer.param_groups if optimizer.optimizer else []) for x in group["params"]]
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        halves, copies, in_fp32 = (
            [x for group in required(optimizer, name) for x in group]
            for name in ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups")
        )
        pairs = [*zip(halves, copies, strict=True), *((x, x) for x in in_fp32)]
    for parameter, updated in pairs:
        yield parameter, updated, 0, parameter.numel()


def replace_inner(optimizer: MegatronOptimizer, inner: torch.optim.Optimizer) -> None:
    """Give an optimizer of megatron-core another inner one, of the same parameter groups."""
    replace_name(optimizer, "optimizer", inner)
