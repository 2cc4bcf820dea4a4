"""Images of any size as a base view and a grid of tiles (LLaVA-NeXT, LLaVA-OneVision).

All geometry is computed here once, on the host: the loader's placeholders and the model's features come from the same
arrays. transformers' own functions decide which features of a grid remain without its padding, so that rounding is the
same.

n: features per tile, p: their rows and columns, p * p = n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import BaseImageProcessor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

from llava_mcore.media.batch_fields import (
    FEATURE_POSITIONS,
    FEATURE_ROWS,
    IMAGE_FIELDS,
    NEWLINE_POSITIONS,
    RESIZED_POSITIONS,
    RESIZED_ROWS,
    RESIZED_WEIGHTS,
    Field,
    Fields,
)
from llava_mcore.media.media import MediaBudget, MediaPlan, MediaTokens, Picture, Size, VideoShape

NEXT_FIELDS: Fields = dict(IMAGE_FIELDS) | {
    FEATURE_ROWS: Field((torch.int64,), index_of="features"),
    NEWLINE_POSITIONS: Field((torch.int64,), index_of="tokens"),
}
ONEVISION_FIELDS: Fields = dict(NEXT_FIELDS) | {
    RESIZED_POSITIONS: Field((torch.int64,), index_of="tokens"),
    RESIZED_ROWS: Field((torch.int64,), (4,), index_of="features"),
    RESIZED_WEIGHTS: Field((torch.float32,), (4,)),
}
_CACHED_SIZES = 4096
_RESIZED_ABOVE = 1.1
"""transformers leaves a grid as it is whose sides are up to this much too long."""


@dataclass(frozen=True)
class AnyRes:
    """How a checkpoint splits images into tiles.

    `pinpoints`: the possible heights and widths of the grid in pixels. `max_tiles`: larger grids are resized
    (`anyres_max_9`: 9); None: never. `several_as_base`: whether several images in a conversation only have their base
    view.
    """

    image_size: int
    patches_per_side: int
    pinpoints: tuple[Size, ...]
    max_tiles: int | None = None
    several_as_base: bool = False


class AnyResPlan(MediaPlan):
    """Base view first, then the grid row by row, each row of features followed by a trained newline."""

    any_size = True

    def __init__(self, image_token_id: int, anyres: AnyRes, fields: Fields) -> None:
        """Results are cached by image size."""
        self.image_token_id, self.anyres, self.fields = image_token_id, anyres, fields
        self.num_base = self.patches_per_tile = anyres.patches_per_side**2
        # Half of a grid may be padding, which has no tokens.
        self.tokens_per_tile = self.num_base // 2
        self._of_size = lru_cache(_CACHED_SIZES)(self._cut)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the cache."""
        return {"image_token_id": self.image_token_id, "anyres": self.anyres, "fields": self.fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        AnyResPlan.__init__(self, **state)

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the tokens of a conversation's images, by their heights and widths in pixels."""
        if self.anyres.several_as_base and len(sizes) > 1:
            return [self._base()] * len(sizes)
        return [self._of_size(size) for size in sizes]

    @property
    def smallest(self) -> MediaBudget:
        """The base view and a newline."""
        return MediaBudget(self.num_base + 1, self.num_base)

    @property
    def largest(self) -> MediaBudget:
        """The base view and the largest grid, with a newline per row. The tower computes a grid before it is
        resized."""
        side = self.anyres.image_size
        grids = [(height // side, width // side) for height, width in self.anyres.pinpoints]
        tiles = max(rows * columns for rows, columns in grids)
        most_tiles = tiles if self.anyres.max_tiles is None else _RESIZED_ABOVE**2 * self.anyres.max_tiles
        tokens = max(
            int(min(rows * columns, most_tiles) * self.num_base) + rows * self.anyres.patches_per_side
            for rows, columns in grids
        )
        return MediaBudget(self.num_base + tokens, (1 + tiles) * self.num_base)

    def pixels(
        self, processor: BaseImageProcessor, images: Sequence[Picture], tokens: Sequence[MediaTokens], **options: Any
    ) -> Tensor:
        """Return the tiles [tiles, 3, h, w] of images; only base views if their tokens say so."""

        def processed(images: list[Any]) -> Tensor:
            return processor(images=images, return_tensors="pt", **options)["pixel_values"]

        bases = [image for image, item in zip(images, tokens, strict=True) if item.num_rows == 1]
        # The image processor splits an image that is alone in its conversation: a single base view is passed twice.
        views = iter(processed([bases if len(bases) > 1 else bases * 2]) if bases else ())
        return torch.cat(
            [
                next(views) if item.num_rows == 1 else processed([image])[0]
                for image, item in zip(images, tokens, strict=True)
            ]
        )

    def _base(self) -> MediaTokens:
        """Return the base view alone, followed by a newline."""
        n = self.num_base
        ids = np.full(n + 1, self.image_token_id, dtype=np.int64)
        return MediaTokens(ids, 1, n, n, self._values(np.arange(n), np.arange(n), np.array([n]), None))

    def _cut(self, size: Size) -> MediaTokens:
        """Return the base view and the grid of an image."""
        p, n = self.anyres.patches_per_side, self.num_base
        pinpoints = [list(x) for x in self.anyres.pinpoints]
        rows, columns = get_anyres_image_grid_shape(size, pinpoints, self.anyres.image_size)
        num_tiles = 1 + rows * columns
        # Feature (a, b) of tile (i, j), as the connector returns them: tile by tile, after the base view.
        features = np.arange(n, num_tiles * n).reshape(rows, columns, p, p).transpose(0, 2, 1, 3)
        grid = torch.from_numpy(features.reshape(1, rows * p, columns * p))
        unpadded: NDArray[np.int64] = unpad_image(grid, size)[0].numpy()
        resized = self._resize(unpadded)
        height, width = unpadded.shape if resized is None else resized[0].shape[:2]
        is_newline = np.zeros((height, width + 1), dtype=np.bool_)
        is_newline[:, -1] = True
        inside = n + np.flatnonzero(~is_newline)
        newlines = n + np.flatnonzero(is_newline)
        ids = np.full(n + is_newline.size, self.image_token_id, dtype=np.int64)
        base = np.arange(n)
        if resized is None:
            values = self._values(np.append(base, inside), np.append(base, unpadded.reshape(-1)), newlines, None)
        else:
            values = self._values(base, base, newlines, (inside, *resized))
        return MediaTokens(ids, num_tiles, num_tiles * n, num_tiles * n, values)

    def _values(
        self,
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        newlines: NDArray[np.int64],
        resized: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]] | None,
    ) -> dict[str, NDArray[Any]]:
        """Return the values of the fields. `resized`: positions, rows and weights of what is interpolated."""
        values: dict[str, NDArray[Any]] = {
            FEATURE_POSITIONS: positions,
            FEATURE_ROWS: rows,
            NEWLINE_POSITIONS: newlines,
        }
        if RESIZED_ROWS in self.fields:
            where, four, weights = resized or (np.empty(0, np.int64), np.empty((0, 4), np.int64), np.empty((0, 4)))
            values |= {
                RESIZED_POSITIONS: where,
                RESIZED_ROWS: four.reshape(-1, 4),
                RESIZED_WEIGHTS: weights.reshape(-1, 4).astype(np.float32),
            }
        return values

    def _resize(self, unpadded: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Return rows and weights [height, width, 4] of a grid that is too large; None if it is not resized."""
        if self.anyres.max_tiles is None:
            return None
        height, width = unpadded.shape
        # transformers: LlavaOnevisionModel.pack_image_features
        ratio = math.sqrt(height * width / (self.anyres.max_tiles * self.anyres.patches_per_side**2))
        return bilinear(unpadded, int(height // ratio), int(width // ratio)) if ratio > _RESIZED_ABOVE else None


def bilinear(rows: NDArray[np.int64], height: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the source rows and weights of each feature of a resized grid, both [height, width, 4].

    Same as torch's `interpolate(…, mode="bilinear")` without aligned corners. `rows`: [h, w].
    """
    top, bottom, down = _neighbors(rows.shape[0], height)
    left, right, across = _neighbors(rows.shape[1], width)
    corners = [rows[np.ix_(y, x)] for y in (top, bottom) for x in (left, right)]
    weights = [np.outer(y, x) for y in (1 - down, down) for x in (1 - across, across)]
    return np.stack(corners, -1), np.stack(weights, -1).astype(np.float32)


def _neighbors(before: int, after: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return lower and upper neighbor of each new point along one axis, and the weight of the upper one."""
    points = (np.arange(after, dtype=np.float32) + np.float32(0.5)) * np.float32(before / after) - np.float32(0.5)
    points = np.maximum(points, np.float32(0))
    lower = points.astype(np.int64)
    return lower, np.minimum(lower + 1, before - 1), points - lower.astype(np.float32)


_CACHED_LENGTHS = 32
"""Cache size, small because 1,000 frames take 10 MB."""


class AnyResVideoPlan(AnyResPlan):
    """Images as in AnyResPlan; each frame of a video is a tile whose features are pooled, then a newline.

    A frame keeps ceil(p / 2) rows and columns, so a video's tokens depend only on the number of its frames.
    """

    def __init__(self, image_token_id: int, anyres: AnyRes, fields: Fields, video_token_id: int) -> None:
        """Arguments: see AnyResPlan; `fields` must include those of resized features."""
        super().__init__(image_token_id, anyres, fields)
        self.video_token_id: int = video_token_id
        self._side = -(-anyres.patches_per_side // 2)
        self.tokens_per_tile = min(self.tokens_per_tile, self._side**2)
        self._of_length = lru_cache(_CACHED_LENGTHS)(self._pooled)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the cache."""
        return super().__getstate__() | {"video_token_id": self.video_token_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        AnyResVideoPlan.__init__(self, **state)

    def video_tokens(self, videos: Sequence[VideoShape]) -> list[MediaTokens]:
        """Return the tokens of videos, by their numbers of frames."""
        return [self._of_length(video.num_frames) for video in videos]

    def _pooled(self, num_frames: int) -> MediaTokens:
        """Like transformers' LlavaOnevisionModel.apply_pooling, which resizes each frame's features bilinearly."""
        p, n = self.anyres.patches_per_side, self.num_base
        rows, weights = bilinear(np.arange(n).reshape(p, p), self._side, self._side)
        firsts = n * np.arange(num_frames)[:, None, None, None]
        every_frame = np.broadcast_to(weights, (num_frames, *weights.shape))
        num_pooled = num_frames * self._side**2
        nothing = np.empty(0, np.int64)
        resized = (np.arange(num_pooled), firsts + rows, every_frame)
        values = self._values(nothing, nothing, np.array([num_pooled]), resized)
        ids = np.full(num_pooled + 1, self.video_token_id, dtype=np.int64)
        return MediaTokens(ids, num_frames, num_frames * n, num_frames * n, values)
