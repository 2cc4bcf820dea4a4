"""Merges adapters into a matrix, in the same order as PEFT's merge, so that the bits are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Matrices:
    """One adapter on one Hugging Face layer: A [r, h], B [o, r], the factor, DoRA's magnitudes [o] or None; fp32."""

    A: Tensor
    B: Tensor
    scaling: float
    magnitude: Tensor | None = None


@torch.no_grad()
def merged(weight: Tensor, adapters: Iterable[Matrices]) -> Tensor:
    """Return a weight [o, h] with adapters added one after the other, in its own dtype."""
    result = weight.clone()
    for adapter in adapters:
        delta = adapter.B @ adapter.A * adapter.scaling
        if adapter.magnitude is None:
            result += delta
            continue
        norm = torch.linalg.norm(weight + delta, dim=1)
        result = ((adapter.magnitude / norm).view(-1, 1) * (result + delta)).to(weight.dtype)
    return result
