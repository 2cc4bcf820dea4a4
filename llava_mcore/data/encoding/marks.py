"""The marks of pictures and videos in the text of turns."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError

MARK_WITH_NEWLINES = re.compile(rf"(\n?(?:{re.escape(IMAGE_MARK)}|{re.escape(VIDEO_MARK)})\n?)")
"""Splits a text into marks and what is between them."""
TYPES = {IMAGE_MARK: "image", VIDEO_MARK: "video"}
"""Of typed parts, as Hugging Face's chat templates call them."""


def count_marks(turns: Iterable[Turn], mark: str) -> int:
    """Return the number of occurrences of a mark in the text of turns."""
    return sum(turn.text.count(mark) for turn in turns)


def check_marks(image_marks: int, num_images: int, video_marks: int, num_videos: int) -> None:
    """Raise DataError unless there are as many marks as pictures and videos."""
    for mark, marks, number, what in (
        (IMAGE_MARK, image_marks, num_images, "pictures"),
        (VIDEO_MARK, video_marks, num_videos, "videos"),
    ):
        if marks != number:
            raise DataError(f"{marks} {mark} in the conversation, but {number} {what}")
