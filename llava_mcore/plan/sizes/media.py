"""Images and audio in numbers: the tokens and the tower's work of an image of a given size.

These are the rules of `media.anyres`, `models.vision.patch_plan` and transformers' processors, without their arrays;
sizes at the edge of a rounding may differ by a row.
"""

from __future__ import annotations

import math
from functools import lru_cache

from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import Work

MEL_RATE = 100
"""Mel frames of a second of audio; two become a position of the encoder, and two of these a token."""


@lru_cache(4096)
def image_work(model: Model, width: int, height: int) -> Work:
    """Return the tokens and the tower's work of an image of this size in pixels."""
    if model.tower.merged > 1:
        return _patches(model, width, height)
    if model.model_type == "idefics2":
        return _idefics2(model, width, height)
    tiles, tokens = _tiles(model, width, height)
    return _of_tiles(model, tiles, tokens)


def audio_work(model: Model, seconds: float) -> Work:
    """Return the tokens and the encoder's work of a clip."""
    positions = max(2, round(seconds * MEL_RATE / 2))
    return Work(
        media_tokens=positions // 2,
        positions=positions,
        pairs=float(positions**2),
        num_items=1,
        pixel_bytes=positions * model.tower.patch_values * 4,
    )


def features_per_tile(model: Model) -> int:
    """Return the tokens of a tile."""
    tower = model.tower
    shuffled = next((x.share for x in model.connector.products if x.per == "position"), 1.0)
    return round(tower.positions * (shuffled if model.connector.latents == 0 else 1))


def _of_tiles(model: Model, tiles: int, tokens: int) -> Work:
    n = model.tower.positions
    return Work(
        media_tokens=tokens,
        positions=tiles * n,
        pairs=float(tiles * n * n),
        num_items=tiles,
        pixel_bytes=tiles * 3 * model.tower.image_side**2,
    )


def _tiles(model: Model, width: int, height: int) -> tuple[int, int]:
    """Return tiles and tokens of an image for a tower of one size."""
    per_tile, rules, side = features_per_tile(model), model.tiles, model.tower.image_side
    if rules.pinpoints:
        return _anyres(model, width, height)
    if model.model_type == "internvl":
        rows, columns = _canvas(width / height, rules.max_tiles or 12)
        tiles = rows * columns + (1 if rows * columns > 1 else 0)
        return tiles, tiles * per_tile + 2
    if rules.resized_to is not None:
        scale = rules.resized_to / max(width, height)
        rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
        tiles = 1 if rows * columns == 1 else rows * columns + 1
        return tiles, tiles * (per_tile + 2) + rows + 2
    return 1, 1 if model.model_type == "mllama" else per_tile


def _anyres(model: Model, width: int, height: int) -> tuple[int, int]:
    """Return tiles and tokens of base view and grid, each of whose rows ends with a newline."""
    side, per_tile = model.tower.image_side, features_per_tile(model)
    across = math.isqrt(per_tile)

    def fit(point: tuple[int, int]) -> tuple[int, int]:
        scale = min(point[1] / width, point[0] / height)
        num_pixels = min(int(width * scale) * int(height * scale), width * height)
        return num_pixels, -(point[0] * point[1] - num_pixels)

    best = max(model.tiles.pinpoints, key=fit)
    rows, columns = best[0] // side, best[1] // side
    high, wide = rows * across, columns * across
    # Padding has no tokens.
    if width / height > wide / high:
        high -= 2 * ((high - int(height * wide / width)) // 2)
    else:
        wide -= 2 * ((wide - int(width * high / height)) // 2)
    max_tiles = model.tiles.max_tiles
    if max_tiles is not None and (ratio := math.sqrt(high * wide / (max_tiles * per_tile))) > 1.1:
        high, wide = int(high // ratio), int(wide // ratio)
    return 1 + rows * columns, per_tile + high * (wide + 1)


def _canvas(aspect: float, max_tiles: int) -> tuple[int, int]:
    """Return rows and columns of the grid whose proportions are nearest; of equally near ones the largest."""
    grids = [(r, c) for r in range(1, max_tiles + 1) for c in range(1, max_tiles // r + 1)]
    return min(grids, key=lambda grid: (abs(aspect - grid[1] / grid[0]), -grid[0] * grid[1]))


def _patches(model: Model, width: int, height: int) -> Work:
    """Return the work of an image that is resized to whole squares of patches (Qwen-VL)."""
    tower, (smallest, largest) = model.tower, model.pixels
    unit = tower.patch * math.isqrt(tower.merged)
    rows, columns = (max(1, round(x / unit)) for x in (height, width))
    if rows * columns * unit * unit > largest:
        scale = math.sqrt(width * height / largest)
        rows, columns = (max(1, math.floor(x / scale / unit)) for x in (height, width))
    elif rows * columns * unit * unit < smallest:
        scale = math.sqrt(smallest / (width * height))
        rows, columns = (math.ceil(x * scale / unit) for x in (height, width))
    n = rows * columns * tower.merged
    # Windows of whole squares; those at the edges are smaller.
    across = tower.window // unit if tower.window else 0
    windows = tower.merged**2 * _cut(rows, across) * _cut(columns, across) if across else 0
    return Work(
        media_tokens=rows * columns,
        positions=n,
        pairs=float(n * n),
        window_pairs=float(windows),
        num_items=1,
        pixel_bytes=n * tower.patch_values,
    )


def _cut(length: int, window: int) -> int:
    """Return the sum of squares of the pieces."""
    return length // window * window**2 + (length % window) ** 2


def _idefics2(model: Model, width: int, height: int) -> Work:
    """Return the work of an image whose longer edge is at most 980 pixels and whose shorter one at least 378."""
    scale = min(1.0, 980 / max(width, height))
    rows, columns = (max(378, x * scale) // model.tower.patch for x in (height, width))
    n = int(rows * columns)
    return Work(
        media_tokens=model.connector.latents,
        positions=n,
        pairs=float(n * n),
        num_items=1,
        pixel_bytes=n * model.tower.patch_values,
    )
