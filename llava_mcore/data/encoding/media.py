"""Pictures, videos and sounds in tokenized text: expands each placeholder to the tokens of the model's plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.encoding.images import picture_size
from llava_mcore.data.encoding.sound.files import sound_length
from llava_mcore.data.encoding.text.tokens import ChatTokens, TextTokens
from llava_mcore.data.samples import Sound, Video
from llava_mcore.errors import DataError
from llava_mcore.models.media import MediaPlan, MediaTokens, Size, VideoShape

NO_SIZE: Size = (0, 0)
"""Size of a picture if the tokens do not depend on it."""


def media_tokens(pictures: Sequence[bytes], plan: MediaPlan, most_pixels: int) -> list[MediaTokens]:
    """Return the tokens of the pictures of one conversation; only headers are read, and only if sizes matter.

    Raises:
        DataError: a picture whose size cannot be read, or that has more than most_pixels.
    """
    return plan.tokens([picture_size(data, most_pixels) if plan.any_size else NO_SIZE for data in pictures])


def video_tokens(videos: Sequence[Video], plan: MediaPlan, most_pixels: int) -> list[MediaTokens]:
    """Return the tokens of the videos of one conversation; only the headers of their frames are read.

    Raises:
        DataError: a frame whose size cannot be read, has more than most_pixels or another size than the first one.
    """
    if not videos:
        return []
    return plan.video_tokens([video_shape(video, number, most_pixels) for number, video in enumerate(videos)])


def video_shape(video: Video, number: int = 0, most_pixels: int = LIMITS.picture_pixels) -> VideoShape:
    """Return the shape that determines a video's tokens. DataError like `video_tokens`; `number` is for the message."""
    first: Size | None = None
    for index, frame in enumerate(video.frames):
        try:
            size = picture_size(frame, most_pixels)
        except DataError as error:
            raise DataError(f"video {number}, frame {index}: {error}") from error
        first = first or size
        if size != first:
            raise DataError(
                f"video {number}: frame {index} has {size[1]} x {size[0]} pixels, but the first one has "
                f"{first[1]} x {first[0]}; frames of a video must have one size"
            )
    if first is None:
        raise DataError(f"video {number} has no frames")
    return VideoShape(len(video.frames), *first, video.fps)


def audio_tokens(sounds: Sequence[Sound], plan: MediaPlan) -> list[MediaTokens]:
    """Return the tokens of the sounds of one conversation; only their headers are read.

    Raises:
        DataError: a sound whose length cannot be read, or that is longer than the model takes.
    """
    if not sounds:
        return []
    return plan.audio_tokens([sound_length(sound.data, plan.sampling_rate) for sound in sounds])


def in_order[T](
    ids: NDArray[np.int64], pictures: Sequence[T], videos: Sequence[T], audios: Sequence[T], plan: MediaPlan
) -> list[T]:
    """Return the items of pictures, videos and sounds in the order of their placeholders in a text.

    A template may put all pictures of a turn before its videos; no kind changes its order.
    """
    queues = {
        plan.image_token_id: iter(pictures),
        plan.video_token_id: iter(videos),
        plan.audio_token_id: iter(audios),
    }
    return [next(queues[i]) for i in ids[np.isin(ids, plan.placeholders)].tolist()]


def expand(tokens: TextTokens, placeholders: Sequence[int], media: Sequence[MediaTokens]) -> ChatTokens:
    """Expand every placeholder to its picture's, video's or sound's tokens, which are never trained.

    Raises ValueError if there are not as many placeholders as media.
    """
    is_media = np.isin(tokens.ids, placeholders)
    repeats = np.ones(len(tokens.ids), dtype=np.int64)
    repeats[is_media] = [len(item) for item in media]
    starts = (np.cumsum(repeats) - repeats)[is_media]
    input_ids = np.repeat(tokens.ids, repeats)
    for start, item in zip(starts, media, strict=True):
        input_ids[start : start + len(item)] = item.ids
    return ChatTokens(input_ids, np.repeat(tokens.trained & ~is_media, repeats), starts, tokens.typed)
