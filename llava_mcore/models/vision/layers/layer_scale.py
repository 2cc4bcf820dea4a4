"""A trained factor per feature of the outputs of attention and MLP (DINOv2, InternViT)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Names in checkpoints: those of the InternViT in Megatron-LM's examples.
CHECKPOINT_NAMES = {"self_attn_bda.scale": "ls1", "mlp_bda.scale": "ls2"}


class LayerScale(nn.Module):
    """Takes the place of megatron-core's bias-dropout-add: residual + dropout(scale * (x + bias)).

    s: positions, b: pictures, h: hidden size.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return a function of ((x [s, b, h], bias [h] or None), residual [s, b, h], dropout)."""

        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = x_with_bias
            x = x if bias is None else x + bias
            return residual + F.dropout(self.scale * x, dropout, training)

        return add
