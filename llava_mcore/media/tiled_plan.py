"""How Mllama's images become tokens: one token each, and tiles of the grid that fits its proportions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BaseImageProcessor
from transformers.models.mllama.image_processing_mllama import (
    get_all_supported_aspect_ratios,
    get_optimal_tiled_canvas,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from llava_mcore.media.batch_fields import ASPECT_RATIO_IDS, ATTENDED_FIELDS, IMAGE_POSITIONS, MEDIA_SEQLENS
from llava_mcore.media.media import MediaBudget, MediaPlan, MediaTokens, Picture, Size


def attended_tiles(ids: Sequence[int], own_tiles: Tensor, image_token_id: int) -> Tensor:
    """Return which tiles each token attends to, int64 [1, s, images, tiles], as transformers' processor says.

    Args:
        ids: [s].
        own_tiles: int64 [1, images, tiles], 1 where a tile is not padding.
    """
    seen = get_cross_attention_token_mask(list(ids), image_token_id)
    counts = own_tiles.sum(-1).tolist()
    return torch.from_numpy(convert_sparse_cross_attention_mask_to_dense([seen], counts, own_tiles.shape[-1], len(ids)))


@dataclass(frozen=True)
class TileGrid:
    """The sizes of a tower for tiles. `max_tiles`: of every image, with padding; `positions`: features of a tile."""

    side: int
    max_tiles: int
    patches: int
    positions: int


class TiledPlan(MediaPlan):
    """An image is one token, which features take the place of in no layer: layers of the decoder attend to them."""

    any_size = True
    fields = ATTENDED_FIELDS
    tokens_per_tile = 64
    """Tokens of an image and the text about it, for the size of buffers."""

    def __init__(self, image_token_id: int, grid: TileGrid) -> None:
        self.image_token_id, self.grid = image_token_id, grid
        self.patches_per_tile = grid.max_tiles * grid.patches
        self.rows_per_tile = grid.max_tiles
        self._ids = {ratio: i for i, ratio in enumerate(get_all_supported_aspect_ratios(grid.max_tiles), 1)}

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the token of each image, and its grid."""
        return [self._token(*size) for size in sizes]

    def _token(self, height: int, width: int) -> MediaTokens:
        grid = self.grid
        canvas = get_optimal_tiled_canvas(height, width, grid.max_tiles, grid.side)
        rows, columns = (int(edge) // grid.side for edge in canvas)
        values = {
            IMAGE_POSITIONS: np.zeros(1, dtype=np.int64),
            ASPECT_RATIO_IDS: np.array([self._ids[rows, columns]]),
            MEDIA_SEQLENS: np.array([rows * columns * grid.patches], dtype=np.int32),
        }
        ids = np.array([self.image_token_id], dtype=np.int64)
        return MediaTokens(ids, rows * columns, self.patches_per_tile, grid.max_tiles * grid.positions, values)

    def pixels(
        self, processor: BaseImageProcessor, images: Sequence[Picture], tokens: Sequence[MediaTokens], **options: Any
    ) -> Tensor:
        """Return the tiles of some images of one conversation; the processor pads them to the same number."""
        padded = processor(images=[list(images)], return_tensors="pt", **options)["pixel_values"][0]
        tiles = torch.cat([x[: item.num_rows] for x, item in zip(padded, tokens, strict=True)])
        # It stacks bytes, too, as fp32.
        return tiles if options.get("do_normalize", True) else tiles.to(torch.uint8)

    def processed_pixels(
        self, processed: Mapping[str, Tensor], rows: Sequence[Sequence[MediaTokens]], row_shape: tuple[int, ...]
    ) -> Tensor:
        """Return the images' own tiles in [b, images, tiles, 3, height, width]."""
        padded = zip(processed["pixel_values"], rows, strict=True)
        return torch.cat([x[: item.num_rows] for of_row, row in padded for x, item in zip(of_row, row, strict=False)])

    @property
    def smallest(self) -> MediaBudget:
        """Return what every image takes: the tower computes padding too."""
        return MediaBudget(1, self.patches_per_tile)

    @property
    def largest(self) -> MediaBudget:
        """Return the same."""
        return self.smallest
