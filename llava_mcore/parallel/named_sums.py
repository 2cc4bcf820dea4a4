"""Named sums of a micro-batch, which its forward pass adds up on the device beside the loss.

A sum has a name, a total and a count. A step adds them up over micro-batches, stages and model replicas, and its log
line has total / count under the name, or the total itself where nothing is counted.

    add_sum("kept_tokens", kept.sum(), kept.numel())             # a metric: only reported
    hidden = with_loss(hidden, "load_balancing", total, count, coefficient=0.01, config=self.config)     # a loss term

**The denominator of a loss term.** Gradients of a step are sums over the trained tokens of the global batch, and
megatron-core divides them once, at the end of the step, by the number of these tokens (`calculate_per_token_loss`). So
the total of a term must be a sum over trained tokens too, and is weighted with the cross-entropy as that of a token is.
A term that is a mean, such as a router's load balancing over the tokens of a micro-batch, is multiplied by the
micro-batch's number of trained tokens first. Whatever the micro-batch size and layout, a term with coefficient k then
adds k * (total / trained tokens of the global batch) to what is minimized. The loss that is logged is the cross-entropy
alone.

**Where.** In any module, on any pipeline stage. What a layer computes a second time in the backward pass
(recomputation) is not added up again, and its gradient is that of the second time. Layers that run as CUDA graphs
cannot take part: a replay runs no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from llava_mcore.parallel.groups import tensor_parallel_group

Sums = dict[str, Tensor]
"""Name -> (total, count), [2]."""
_COLLECTED: ContextVar[Sums | None] = ContextVar("sums", default=None)
"""The sums of the forward pass that is running; None in backward passes and elsewhere."""
_DATASETS: ContextVar[Datasets | None] = ContextVar("datasets", default=None)
"""Those of its micro-batch; None without a blend."""


@dataclass(frozen=True)
class Datasets:
    """The dataset of each token of a micro-batch. ids: int32 [b, s]. count: datasets of the blend."""

    ids: Tensor
    count: int


@contextmanager
def collect_sums(datasets: Datasets | None = None) -> Iterator[Sums]:
    """Collect what is added in this block. It does not reach the threads of a backward pass.

    Args:
        datasets: for `add_token_losses`.
    """
    sums: Sums = {}
    tokens = _COLLECTED.set(sums), _DATASETS.set(datasets)
    try:
        yield sums
    finally:
        _COLLECTED.reset(tokens[0])
        _DATASETS.reset(tokens[1])


def dataset_sum(index: int) -> str:
    """Return the name of the sum of a dataset's losses."""
    return f"loss of dataset {index}"


def add_token_losses(losses: Tensor, weights: Tensor) -> None:
    """Add the loss of every token to the sum of its dataset. losses, weights (the loss mask): [b, s]. No host sync."""
    datasets = _DATASETS.get()
    if datasets is None:
        return
    weighted = losses.detach() * weights
    for index in range(datasets.count):
        of_dataset = datasets.ids == index
        add_sum(dataset_sum(index), (weighted * of_dataset).double().sum(), (weights * of_dataset).sum())


def add_sum(name: str, total: Tensor, count: Tensor | float, *, divided: bool = False) -> None:
    """Add to a named sum of the micro-batch whose forward pass is running; outside of one, do nothing. No host sync.

    Args:
        total: [], on the device.
        count: what to divide the total by; 0 for a total that is reported as it is.
        divided: each tensor-parallel rank has its own part, as with sequence parallelism. Otherwise all have the same,
            and that of the first is taken.
    """
    sums = _COLLECTED.get()
    if sums is None or not (divided or tensor_parallel_group().rank() == 0):
        return
    counted = count.detach() if isinstance(count, Tensor) else total.new_full((), count, dtype=torch.float64)
    pair = torch.stack([total.detach().double(), counted.double()])
    sums[name] = sums[name] + pair if name in sums else pair


def with_loss(
    x: Tensor,
    name: str,
    total: Tensor,
    count: Tensor | float,
    *,
    coefficient: float,
    config: TransformerConfig,
    divided: bool = False,
) -> Tensor:
    """Return an activation unchanged, but let its backward pass also reach a loss term; report the term.

    Args:
        x: anything that the loss depends on.
        total: [], the term's sum over trained tokens (see the top of this file), without the coefficient.
        count, divided: see `add_sum`.
        config: the module's; its `grad_scale_func` is fp16's loss scale.
    """
    add_sum(name, total, count, divided=divided)
    result: Tensor = _WithLoss.apply(x, total, coefficient, config.grad_scale_func)
    # A pipeline frees the outputs of its stages, and refuses those that are views.
    return make_viewless_tensor(result, requires_grad=result.requires_grad, keep_graph=True)


class _WithLoss(torch.autograd.Function):
    """x, total [] → x. The gradient of `total` is the coefficient, times the loss scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, total: Tensor, coefficient: float, scale: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        ctx.save_for_backward(total)
        ctx.coefficient, ctx.scale = coefficient, scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (total,) = ctx.saved_tensors
        gradient = torch.full_like(total, ctx.coefficient)
        if ctx.scale is not None:
            gradient = ctx.scale(gradient).reshape(total.shape).to(total.dtype)
        return grad, gradient, None, None
