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
        pixels: tiles [k, 3, h, w] or patches [n, 3 * f]; uint8, or float32 that is already normalized.
        scale: float32 [2, 3], mean and standard deviation of each channel for values of 0 to 255; unused for float32.
    """
    if pixels.dtype != torch.uint8:
        return pixels
    if pixels.ndim == 2:
        mean, std = scale[:, :, None]
        return pixels.unflatten(1, (3, -1)).float().sub_(mean).div_(std).flatten(1)
    mean, std = scale[:, :, None, None]
    # Loaders return channels_last, for which other convolution kernels with other rounding would be used.
    return pixels.contiguous().float().sub_(mean).div_(std)


def in_memory(pixels: Tensor) -> Tensor:
    """Return tiles [k, 3, h, w] with the channels last, as the loader's are in memory; patches as they are."""
    return pixels.permute(0, 2, 3, 1) if pixels.ndim == 4 else pixels


def as_used(pixels: Tensor) -> Tensor:
    """The inverse of `in_memory`."""
    return pixels.permute(0, 3, 1, 2) if pixels.ndim == 4 else pixels
