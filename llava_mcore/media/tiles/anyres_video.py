"""Videos together with pictures of any size (LLaVA-OneVision): each frame a tile whose features are pooled, then a
newline.

n: features per tile, p: their rows and columns, p * p = n; a frame keeps ceil(p / 2) of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from llava_mcore.media.batch_fields import Fields
from llava_mcore.media.media import MediaTokens, VideoShape
from llava_mcore.media.tiles.anyres import AnyRes, AnyResPlan, bilinear

_CACHED_LENGTHS = 32
"""Cache size, small because 1,000 frames take 10 MB."""


class AnyResVideoPlan(AnyResPlan):
    """Pictures as in AnyResPlan. A video's tokens depend only on the number of its frames."""

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
