"""Rotary angles of tokens by their positions, which may have several axes: time, height and width (M-RoPE, Qwen2-VL,
arXiv 2409.12191).

a: axes, b: samples, s: tokens, d: rotated dims of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TokenRope(nn.Module):
    """Rotary embedding for megatron-core's GPTModel. Its own classes make a table of indices, or read chunked sections
    only, and need CUDA."""

    def __init__(self, inv_freq: Tensor, axes: Tensor | None = None) -> None:
        """Keep what angles are computed from.

        Args:
            inv_freq: float32 [d / 2].
            axes: int64 [d / 2], which axis of a position each frequency is multiplied by; None: there is only one.
        """
        super().__init__()
        self.inv_freq, self.axes = inv_freq, axes  # no buffers: a model that is built without memory would lose them

    def forward(self, position_ids: Tensor, mrope_section: Any = None, cp_group: Any = None) -> Tensor:
        """Return angles float32 [s, b, 1, d] of positions int64 [b, s], [a, b, s] where there are axes.

        The other arguments are not looked at.
        """
        if self.inv_freq.device != position_ids.device:
            self.inv_freq = self.inv_freq.to(position_ids.device)
            self.axes = None if self.axes is None else self.axes.to(position_ids.device)
        by_axis = position_ids[None] if self.axes is None else position_ids[self.axes]
        angles = by_axis.permute(2, 1, 0).float() * self.inv_freq  # [s, b, d / 2]
        return torch.cat((angles, angles), dim=-1)[:, :, None]
