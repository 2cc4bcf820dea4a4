"""Rotary angles of positions along several axes: time, height and width (M-RoPE, Qwen2-VL, arXiv 2409.12191).

a: axes, b: samples, s: tokens, d: rotated dims of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MultimodalRope(nn.Module):
    """What megatron-core's GPTModel asks for angles; its own class reads chunked sections only, and needs CUDA."""

    def __init__(self, inv_freq: Tensor, axes: Tensor) -> None:
        """Keep what angles are computed from.

        Args:
            inv_freq: float32 [d / 2].
            axes: int64 [d / 2], which axis of a position each frequency is multiplied by.
        """
        super().__init__()
        self.inv_freq, self.axes = inv_freq, axes  # no buffers: a model that is built without memory would lose them

    def forward(self, position_ids: Tensor, mrope_section: Any = None, cp_group: Any = None) -> Tensor:
        """Return angles float32 [s, b, 1, d] of positions int64 [a, b, s]; the other arguments are not looked at."""
        if self.inv_freq.device != position_ids.device:
            self.inv_freq, self.axes = (x.to(position_ids.device) for x in (self.inv_freq, self.axes))
        angles = position_ids[self.axes].permute(2, 1, 0).float() * self.inv_freq  # [s, b, d / 2]
        return torch.cat((angles, angles), dim=-1)[:, :, None]
