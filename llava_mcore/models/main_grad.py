"""Gradients that a layer adds to `main_grad` itself, megatron-core's sum over the micro-batches of a step."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import Parameter


def marked_as_added(weight: Parameter) -> Tensor:
    """Return what stands for a gradient that is in `main_grad`, as megatron-core's own layers do: data parallelism
    waits for it and adds it only if the weight is that of the embedding and of the output layer, whose gradients
    autograd adds to each other."""
    attributes = vars(weight)
    attributes["grad_added_to_main_grad"] = True
    return torch.zeros_like(weight) if attributes.get("zero_out_wgrad") else torch.empty_like(weight)


def added_to_main_grad(weight: Tensor, gradient: Tensor) -> Tensor:
    """Add a gradient to the sum of the step, if data parallelism has prepared one. Return a placeholder for the
    backward pass in that case: a tensor of arbitrary values that all layers share, so CUDA graphs keep only one."""
    marks = vars(weight)
    if "main_grad" not in marks:
        return gradient
    total = marks["main_grad"]
    if gradient.device.type == "cuda" and total.dtype == torch.float32 and total.is_contiguous():
        from llava_mcore.models.kernels.add_gradients import add_gradient  # on GPUs only

        add_gradient(total, gradient)
    else:
        total.add_(gradient)
    marks["grad_added_to_main_grad"] = True
    return _placeholder(gradient.shape, gradient.dtype, gradient.device).detach()


@functools.cache
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
