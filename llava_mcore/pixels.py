"""Pixels are sent as bytes and normalized on the device that computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

NO_SCALE = torch.empty(0, 3)
"""The scale of pixel values that are already normalized."""


def normalize(pixels: Tensor, scale: Tensor) -> Tensor:
    """Return float32 pixel values bitwise equal to those of Hugging Face's image processors.

    They fold rescaling into mean and standard deviation: (x / 255 - mean) / std is (x - 255 mean) / (255 std).

    Args:
        pixels: [k, 3, h, w]; uint8, or float32 that is already normalized.
        scale: float32 [2, 3], mean and standard deviation of each channel for values of 0 to 255; unused for float32.
    """
    if pixels.dtype != torch.uint8:
        return pixels
    mean, std = scale[:, :, None, None]
    # Loaders return channels_last, for which other convolution kernels with other rounding would be used.
    return pixels.contiguous().float().sub_(mean).div_(std)
