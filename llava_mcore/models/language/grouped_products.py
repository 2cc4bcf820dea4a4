"""Products of each expert's tokens and its matrix.

e: experts, t: tokens, sorted by expert, n, k: rows and columns of an expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.models.main_grad import added_to_main_grad


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, *, adds_to_main_grad: bool = False) -> Tensor:
    """Return each expert's tokens times its matrix: [t, k], [e, n, k] → [t, n]. ends: int32 [e], where they end.

    Args:
        adds_to_main_grad: on a GPU, add the weight's gradient to the sum of the step in the backward pass.
    """
    has_kernel = x.device.type == "cuda" and x.dtype == torch.bfloat16
    if has_kernel and not any(size * x.itemsize % 16 for size in weight.shape[1:]):  # the kernel's rows
        output: Tensor = GroupedProduct.apply(x, weight, ends, adds_to_main_grad)
        return output
    parts = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight, strict=True)])


class GroupedProduct(torch.autograd.Function):
    """The product of each expert's tokens and its matrix on a GPU: [t, k], [e, n, k] → [t, n].

    The host waits for nothing. An expert without tokens gets a gradient of zeros. (torch's own backward pass could not
    add weight gradients to the fp32 sum of a step.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, adds_to_main_grad: bool) -> Tensor:
        """Return the product. adds_to_main_grad: add the weight's gradient to the sum of the step."""
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.adds_to_main_grad = weight, adds_to_main_grad
        if not len(x):  # the kernel refuses empty operands
            return x.new_empty(0, weight.shape[1])
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        x, ends = ctx.saved_tensors
        weight: Tensor = ctx.weight
        gradient = gradient.contiguous()
        of_x, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(gradient, weight, offs=ends) if len(x) else torch.empty_like(x)
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(gradient, x, weight, ends, adds_to_main_grad=ctx.adds_to_main_grad)
        return of_x, of_weight, None, None


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor, ends: Tensor, *, adds_to_main_grad: bool) -> Tensor:
    """Return the gradient [e, n, k] of each expert's matrix, or a placeholder if it was added to the sum of the step.

    Args:
        gradient: of the product [t, n]. x: [t, k].
    """
    of_weight = F.grouped_mm(gradient.t(), x, offs=ends) if len(x) else torch.zeros_like(weight)
    return added_to_main_grad(weight, of_weight) if adds_to_main_grad else of_weight


class FrozenGroupedProduct(torch.autograd.Function):
    """The product of each expert's tokens and a matrix that is made for either pass: [t, k], [e, n, k] → [t, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[], Tensor], ends: Tensor) -> Tensor:
        ctx.make = make
        ctx.save_for_backward(ends)
        return _frozen_product(x, make(), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        return _frozen_product(gradients[0].contiguous(), ctx.make().transpose(1, 2), ends), None, None


def _frozen_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [t, n] of [t, k] and [e, n, k], without a graph."""
    if not len(x):
        return x.new_empty(0, weight.shape[1])
    if x.device.type == "cuda" and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight, strict=True)])
