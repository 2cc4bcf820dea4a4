"""CUDA graphs by Transformer Engine 2.20 of parts of a megatron-core 0.19.2 model.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import cuda_graphs
from torch import Tensor, nn

from llava_mcore.compat.required import replace_name, required

Pool = tuple[int, int]
"""Memory that graphs share which never run at the same time."""


def make_graph(part: nn.Module, sample: tuple[Tensor, ...], *, recipe: Any, pool: Pool) -> Callable[..., Tensor]:
    """Capture the forward and backward pass of a part; a collective call of the ranks that exchange data in it.

    Parameters get no gradients from this. What their gradients are added to must be reset afterwards.

    Args:
        part: a module in training mode that takes and returns tensors only.
        sample: its arguments, whose memory later arguments are copied into.
        recipe: Transformer Engine's FP8 recipe; None if the part does not multiply in FP8.
        pool: see `torch.cuda.graph_pool_handle`. Graphs that may run between this one's passes need another.

    Returns:
        A function of its arguments and, with FP8, `is_first_microbatch`.
    """
    from transformer_engine.pytorch import make_graphed_callables  # on GPUs only

    _without_random_numbers(part)
    with _capturing():
        found: tuple[Callable[..., Tensor]] = make_graphed_callables(
            (part,),
            (sample,),
            allow_unused_input=True,
            enabled=(recipe is not None,),
            recipe=recipe,
            cache_quantized_params=recipe is not None,
            pool=pool,
            clone_param_grads_on_return=False,  # data parallelism adds them up before the next pass
        )
    return found[0]


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
