"""The named tensors that carry images and audio from the loader's processes to the model.

Each architecture lists the fields of its batches; collation, padding and broadcasts only read `Field`. Pixels are sent
as bytes, and normalized on the device that computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One named tensor of a micro-batch; the samples' tensors are concatenated along the first dim.

    `dtypes`: the allowed ones. `item_shape`: the dims after the first; None allows any size that all batches of a run
    share. `index_of`: what the values are indices of, if they are: "tokens" [b * s] or "features", the rows that the
    connector returns for all images of the micro-batch; concatenation shifts them. `shared`: every sample has the
    same values, and a micro-batch keeps one copy.
    """

    dtypes: tuple[torch.dtype, ...]
    item_shape: tuple[int | None, ...] = ()
    index_of: Literal["tokens", "features"] | None = None
    shared: bool = False

    def joined(self, values: Sequence[NDArray[Any]], before: Sequence[int]) -> Tensor:
        """Return the values of all images of a micro-batch as one tensor.

        Args:
            values: those of each image.
            before: for indices, the number of tokens or features before each image.
        """
        if not values:
            return torch.empty([0, *(n or 0 for n in self.item_shape)], dtype=self.dtypes[0])
        if self.index_of is not None:
            values = [value + offset for value, offset in zip(values, before, strict=True)]
        return torch.from_numpy(np.concatenate(values)).to(self.dtypes[0])


Fields = Mapping[str, Field]
"""Fields by name, in the order in which they are sent."""

PIXEL_VALUES, PIXEL_SCALE, FEATURE_POSITIONS = "pixel_values", "pixel_scale", "feature_positions"
FEATURE_ROWS = "feature_rows"
"""Indices of the connector's features, in the order of FEATURE_POSITIONS. Without this field: all features, in
order."""
NEWLINE_POSITIONS = "newline_positions"
"""Positions of the tokens that the learned newline replaces."""
RESIZED_POSITIONS, RESIZED_ROWS, RESIZED_WEIGHTS = "resized_positions", "resized_rows", "resized_weights"
"""Positions of the tokens that features of a resized grid replace; each is a weighted sum of four connector
features."""

PATCH_POSITIONS = "patch_positions"
"""Row and column of each patch in its image, in the order of PIXEL_VALUES, as in all fields of patches."""
MEDIA_SEQLENS = "media_seqlens"
"""Lengths of the packed sequences within which patches see each other: an image, a frame of a video, or a clip of
audio, whose patches are the encoder's hidden frames."""
WINDOW_ORDER, WINDOW_SEQLENS = "window_order", "window_seqlens"
"""For layers that see windows: the squares of patches in the order of the windows, and the patches of each window.
The connector returns features in this order, and FEATURE_POSITIONS are in it too."""
POSITION_ROWS, POSITION_WEIGHTS = "position_rows", "position_weights"
"""The position embedding of a patch is a weighted sum of four rows of the tower's table; without weights, one row."""

IMAGE_FIELDS: Fields = {
    PIXEL_VALUES: Field((torch.uint8, torch.float32), (3, None, None)),
    PIXEL_SCALE: Field((torch.float32,), (3,), shared=True),
    FEATURE_POSITIONS: Field((torch.int64,), index_of="tokens"),
}
"""Tiles of one size (an image is one or several), what normalizes them (see `pixels.normalize`; no rows where they
are float32), and the token that each feature takes the place of."""

PATCH_FIELDS: Fields = {
    PIXEL_VALUES: Field((torch.uint8, torch.float32), (None,)),
    PIXEL_SCALE: Field((torch.float32,), (3,), shared=True),
    FEATURE_POSITIONS: Field((torch.int64,), index_of="tokens"),
    PATCH_POSITIONS: Field((torch.int32,), (2,)),
    MEDIA_SEQLENS: Field((torch.int32,)),
}
"""Packed patches [patches, 3 * frames * height * width] of images of any size, and what their tower needs to know."""
TABLE_PATCH_FIELDS: Fields = {
    **{name: field for name, field in PATCH_FIELDS.items() if name != PATCH_POSITIONS},
    POSITION_ROWS: Field((torch.int64,)),
}
"""The same for a tower that looks up the position of a patch in its table."""
IMAGE_POSITIONS, ASPECT_RATIO_IDS = "image_positions", "aspect_ratio_ids"
"""For decoders that attend to images: the token of each image, and the number of its grid of tiles."""
ATTENDED_FIELDS: Fields = {
    PIXEL_VALUES: Field((torch.uint8, torch.float32), (3, None, None)),
    PIXEL_SCALE: Field((torch.float32,), (3,), shared=True),
    IMAGE_POSITIONS: Field((torch.int64,), index_of="tokens"),
    ASPECT_RATIO_IDS: Field((torch.int64,)),
    MEDIA_SEQLENS: Field((torch.int32,)),
}
"""Tiles of images whose features take the place of no token; MEDIA_SEQLENS are the patches of an image's tiles."""


AUDIO_FIELDS: Fields = {
    PIXEL_VALUES: Field((torch.float32,), (None,)),
    PIXEL_SCALE: Field((torch.float32,), (3,), shared=True),
    FEATURE_POSITIONS: Field((torch.int64,), index_of="tokens"),
    MEDIA_SEQLENS: Field((torch.int32,)),
}
"""Packed mel frames of audio clips [rows, mel bins], which nothing normalizes (PIXEL_SCALE has no rows), and the
hidden frames of each clip."""


@dataclass(frozen=True)
class MediaWork:
    """The amount of media in a step, from the shapes of their fields.

    `num_tiles`: images of the tower's size, for towers that take those. The other counts are for towers that take
    packed patches or frames of audio: `num_sequences` counts MEDIA_SEQLENS; `num_pairs` and `num_window_pairs` are
    (query, key) pairs, in a layer that sees whole images and in one that sees windows.
    """

    num_tiles: int = 0
    num_patches: int = 0
    num_pairs: int = 0
    num_window_pairs: int = 0
    num_sequences: int = 0


def media_work(media: Mapping[str, Tensor]) -> MediaWork:
    """Return what a tower computes on for the fields of a micro-batch; they are on the host."""
    pixels = media[PIXEL_VALUES]
    if MEDIA_SEQLENS not in media:
        return MediaWork(num_tiles=len(pixels))
    windows = media.get(WINDOW_SEQLENS)
    return MediaWork(
        num_patches=int(media[MEDIA_SEQLENS].sum()),
        num_pairs=_sum_of_squares(media[MEDIA_SEQLENS]),
        num_window_pairs=0 if windows is None else _sum_of_squares(windows),
        num_sequences=len(media[MEDIA_SEQLENS]),
    )


def _sum_of_squares(x: Tensor) -> int:
    return int(x.long().square().sum())


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
