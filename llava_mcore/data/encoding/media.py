"""Pictures in tokenized text: one placeholder each becomes the tokens that the model's plan says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llava_mcore.data.encoding.chat_tokens import ChatTokens, TextTokens
from llava_mcore.data.encoding.images import picture_size
from llava_mcore.models.media import MediaPlan, MediaTokens, Size

NO_SIZE: Size = (0, 0)
"""Of a picture whose size nobody asks for."""


def media_tokens(pictures: Sequence[bytes], plan: MediaPlan, most_pixels: int) -> list[MediaTokens]:
    """Return what the pictures of one conversation become; only headers are read, and only where sizes matter.

    Raises:
        DataError: a picture whose size cannot be read, or that has more than most_pixels.
    """
    return plan.tokens([picture_size(data, most_pixels) if plan.any_size else NO_SIZE for data in pictures])


def expand(tokens: TextTokens, image_token_id: int, media: Sequence[MediaTokens]) -> ChatTokens:
    """Let every placeholder become its picture's tokens, which are never trained.

    Raises ValueError if there are not as many placeholders as pictures.
    """
    is_image = tokens.ids == image_token_id
    repeats = np.ones(len(tokens.ids), dtype=np.int64)
    repeats[is_image] = [len(item) for item in media]
    starts = (np.cumsum(repeats) - repeats)[is_image]
    input_ids = np.repeat(tokens.ids, repeats)
    for start, item in zip(starts, media, strict=True):
        input_ids[start : start + len(item)] = item.ids
    return ChatTokens(input_ids, np.repeat(tokens.trained & ~is_image, repeats), starts, tokens.typed)
