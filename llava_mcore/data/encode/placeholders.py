"""Pictures, videos and sounds in tokenized text: expands each placeholder to the tokens of the model's plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.encode.picture_header import picture_size
from llava_mcore.data.encode.sound.sound_files import sound_length
from llava_mcore.data.encode.text.tokens import ChatTokens, TextTokens
from llava_mcore.data.samples import Sound, Video
from llava_mcore.errors import DataError
from llava_mcore.media.media import MediaPlan, MediaTokens, Size, VideoShape

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
    return plan.video_tokens([video_shape(video, index, most_pixels) for index, video in enumerate(videos)])


def video_shape(video: Video, video_index: int = 0, most_pixels: int = LIMITS.picture_pixels) -> VideoShape:
    """Return the shape that determines a video's tokens. DataError like `video_tokens`; `video_index`: for
    messages."""
    first: Size | None = None
    for index, frame in enumerate(video.frames):
        try:
            size = picture_size(frame, most_pixels)
        except DataError as error:
            raise DataError(f"video {video_index}, frame {index}: {error}") from error
        first = first or size
        if size != first:
            raise DataError(
                f"video {video_index}: frame {index} has {size[1]} x {size[0]} pixels, but the first one has "
                f"{first[1]} x {first[0]}; frames of a video must have one size"
            )
    if first is None:
        raise DataError(f"video {video_index} has no frames")
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
    return [next(queues[i]) for i in ids[_places(ids, plan.placeholders)].tolist()]


def expand(tokens: TextTokens, placeholders: Sequence[int], media: Sequence[MediaTokens]) -> ChatTokens:
    """Expand every placeholder to its picture's, video's or sound's tokens, which are never trained.

    Raises ValueError if there are not as many placeholders as media.
    """
    ids: list[NDArray[np.int64]] = []
    trained: list[NDArray[np.bool_]] = []
    starts, added, done = [], 0, 0
    for place, item in zip(_places(tokens.ids, placeholders).tolist(), media, strict=True):
        ids += (tokens.ids[done:place], item.ids)
        trained += (tokens.trained[done:place], np.zeros(len(item), dtype=np.bool_))
        starts.append(place + added)
        added, done = added + len(item) - 1, place + 1
    input_ids = np.concatenate([*ids, tokens.ids[done:]])
    is_trained = np.concatenate([*trained, tokens.trained[done:]])
    return ChatTokens(input_ids, is_trained, np.array(starts, dtype=np.int64), tokens.typed)


def _places(ids: NDArray[np.int64], placeholders: Sequence[int]) -> NDArray[np.int64]:
    """Return the indices of placeholders. `np.isin` takes ten times as long for so few of them."""
    is_media = np.zeros(len(ids), dtype=np.bool_)
    for placeholder in placeholders:
        is_media |= ids == placeholder
    return np.flatnonzero(is_media)
