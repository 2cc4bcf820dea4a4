"""Pixels travel as bytes and become numbers on the device that computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

NO_SCALE = torch.empty(0, 3)
"""The scale of pixel values that are numbers already."""


def normalise(pixels: Tensor, scale: Tensor) -> Tensor:
    """Return float32 pixel values as Hugging Face's image processors compute them, bit by bit.

    They put rescaling into mean and standard deviation, so that (x / 255 - mean) / std is (x - 255 mean) / (255 std).

    Args:
        pixels: [k, 3, h, w]; uint8, or float32 that is done already.
        scale: float32 [2, 3], mean and standard deviation of each channel in units of the bytes; not read for float32.
    """
    if pixels.dtype != torch.uint8:
        return pixels
    mean, std = scale[:, :, None, None]
    # Loaders hand over channels_last, in which other convolution kernels would compute with other roundings.
    return pixels.contiguous().float().sub_(mean).div_(std)
