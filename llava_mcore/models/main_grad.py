"""Gradients that a layer adds to `main_grad` itself, megatron-core's sum over the micro-batches of a step."""

from __future__ import annotations

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
