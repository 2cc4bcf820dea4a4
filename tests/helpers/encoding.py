"""Tokens with images of a fixed number of tokens, as in LLaVA-1.5."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.chat_format import ChatFormat
from llava_mcore.data.encode.tokens import ChatTokens, expand, media_tokens
from llava_mcore.data.processors.image_processor import ImagePreprocessor
from llava_mcore.data.samples import MediaSpan, Turn
from llava_mcore.media.media import MediaTokens, SameTokens

N = 16

assets_once = functools.cache(load_assets)
"""Reads the assets of a folder, once in a process."""


def tokens_of_a_picture(image_token_id: int, num_tokens: int = N) -> MediaTokens:
    return SameTokens(image_token_id, num_tokens, num_tokens).tokens([(0, 0)])[0]


def encoded(format_: ChatFormat, turns: Sequence[Turn], *, num_images: int, num_tokens: int = N) -> ChatTokens:
    """Tokenize a conversation, every image as `num_tokens` placeholders."""
    text = format_.text_tokens(turns, num_images=num_images)
    picture = tokens_of_a_picture(format_.media_ids["<image>"], num_tokens)
    return expand(text, [format_.media_ids["<image>"]], [picture] * num_images)


def image_positions(tokens: ChatTokens, num_tokens: int = N) -> NDArray[np.int64]:
    """Return the indices of all placeholders."""
    return (tokens.starts[:, None] + np.arange(num_tokens)).reshape(-1)


def placed(places: Sequence[int], image_token_id: int, num_tokens: int) -> tuple[MediaSpan, ...]:
    """Images from these indices on."""
    picture = tokens_of_a_picture(image_token_id, num_tokens)
    return tuple(MediaSpan(b"%d" % i, place, picture) for i, place in enumerate(places))


def tiles(images: ImagePreprocessor, data: Sequence[bytes]) -> Tensor:
    """Return the tiles of images, each as if alone in a conversation."""
    tokens = [media_tokens([picture], images.plan, images.most_pixels)[0] for picture in data]
    return images.tiles([MediaSpan(picture, 0, item) for picture, item in zip(data, tokens, strict=True)])
