"""CUDA graphs by Transformer Engine 2.20 of parts of a megatron-core 0.19.2 model.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import cuda_graphs
from torch import Tensor, nn

from llava_mcore.compat.required import replace_name, required

Pool = tuple[int, int]
"""Memory that graphs share which never run at the same time."""


def make_graphs(
    parts: Sequence[nn.Module], samples: Sequence[tuple[Tensor, ...]], *, fp8: Sequence[bool], recipe: Any, pool: Pool
) -> list[Callable[..., Any]]:
    """Capture the forward and backward passes of parts that run one after the other; a collective call of the ranks
    that exchange data in them.

    Parameters get no gradients from this. What their gradients are added to must be reset afterwards.

    Args:
        parts: modules in training mode that take and return tensors only.
        samples: arguments of each part, whose memory later arguments are copied into.
        fp8: whether a part multiplies in FP8.
        recipe: Transformer Engine's FP8 recipe; None without FP8.
        pool: see `torch.cuda.graph_pool_handle`.

    Returns:
        For each part a function of its arguments and, with FP8, `is_first_microbatch`.
    """
    from transformer_engine.pytorch import make_graphed_callables  # on GPUs only

    # What a capture cannot hold, or should not keep: random numbers, activations of the warm-up.
    for part in parts:
        _without_random_numbers(part)
    dropping = DropActivations(parameter for part in parts for parameter in part.parameters())

    def after_warm_up() -> None:
        dropping.__exit__()
        torch.cuda.empty_cache()  # graphs have memory of their own: they cannot use what is cached here

    with _capturing():
        graphs = make_graphed_callables(
            tuple(parts),
            tuple(samples),
            allow_unused_input=True,
            enabled=tuple(fp8),
            recipe=recipe,
            cache_quantized_params=any(fp8),
            pool=pool,
            clone_param_grads_on_return=False,  # data parallelism adds them up before the next pass
            pre_warmup_hook=dropping.__enter__,
            post_warmup_hook=after_warm_up,
        )
    return list(graphs)


def destroy_graphs(graphs: Iterable[Callable[..., Any]]) -> None:
    """Destroy what `make_graphs` returned. NCCL waits for this before it ends a communicator whose messages they
    hold."""
    for graph in graphs:
        required(graph, "reset")()


_TensorSpec = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Arguments from which a tensor of undefined values is made."""


class DropActivations(torch.autograd.graph.saved_tensors_hooks):
    """Keeps the shapes of large tensors instead of the tensors for backward passes whose results nobody uses.

    Before a capture Transformer Engine runs the forward passes of all parts, then their backward passes, so that
    libraries do the work of their first calls. Keeping all activations meanwhile would take as much memory again as the
    graphs do.
    """

    LARGE = 2**20
    """Bytes. Smaller tensors are kept."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        addresses = {parameter.data_ptr() for parameter in parameters}

        def pack(x: Tensor) -> Tensor | _TensorSpec:
            # Integers may be indices, except those of one byte, which hold FP8 values. Quantized weights are of classes
            # of their own and kept between passes anyway.
            values = type(x) is Tensor and (x.is_floating_point() or x.dtype == torch.uint8)
            if not values or x.numel() * x.itemsize < self.LARGE or x.data_ptr() in addresses:
                return x.detach()
            return x.size(), x.stride(), x.dtype, x.device

        def unpack(x: Tensor | _TensorSpec) -> Tensor:
            if isinstance(x, Tensor):
                return x
            size, stride, dtype, device = x
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

        super().__init__(pack, unpack)


def parameter_gathering(chunk: DistributedDataParallel) -> Callable[[nn.Module], None] | None:
    """Return what must run before a module's parameters are used; None if they are never being gathered then.

    Data parallelism puts it before the forward pass of every module, which does not happen in a graph.
    """
    if not chunk.ddp_config.overlap_param_gather:
        return None
    hook: Callable[[nn.Module], None] = required(chunk, "_make_forward_pre_hook")()
    return hook


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Keep megatron-core's data parallelism from reacting to passes that are only captured, and let other threads
    allocate meanwhile: the one that pins the next step's data does, and would end the capture with an error."""
    from transformer_engine.pytorch import graph  # on GPUs only

    context = required(graph, "_graph_context_wrapper")
    replace_name(graph, "_graph_context_wrapper", partial(context, capture_error_mode="thread_local"))
    required(cuda_graphs, "_set_capture_start")()
    try:
        yield
    finally:
        required(cuda_graphs, "_set_capture_end")()
        replace_name(graph, "_graph_context_wrapper", context)


def _without_random_numbers(part: nn.Module) -> None:
    """Detach the states of random numbers that Transformer Engine would capture: attention has no dropout here, and
    megatron-core keeps the states in a form that cannot be captured."""
    from transformer_engine.pytorch import DotProductAttention, distributed  # on GPUs only

    for module in part.modules():
        if isinstance(module, DotProductAttention):
            replace_name(module, "rng_states_tracker", None)
    required(distributed, "set_all_rng_states")({})


def new_pool() -> Pool:
    """Return a new pool of memory for graphs."""
    pool: Pool = torch.cuda.graph_pool_handle()
    return pool
