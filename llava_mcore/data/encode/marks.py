"""The marks of images, videos and audio clips in the text of turns, and how a text says that it means no image.

`<\\image>` is the text `<image>`, `<\\\\image>` the text `<\\image>`, and so on: a backslash after the bracket is
removed when the text is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError

TYPES = {IMAGE_MARK: "image", VIDEO_MARK: "video", AUDIO_MARK: "audio"}
"""Types of content parts, as Hugging Face's chat templates call them."""
NAMES = {IMAGE_MARK: "image", VIDEO_MARK: "video", AUDIO_MARK: "audio clip"}
"""For messages."""
_ARTICLES = {IMAGE_MARK: "an image", VIDEO_MARK: "a video", AUDIO_MARK: "an audio clip"}
LITERAL_REASON = "the model takes no such media"
"""For messages: why a mark is text."""
MARK_ADVICE = {mark: f"where {article} belongs, write {mark}" for mark, article in _ARTICLES.items()}
"""For messages about a text that has the model's placeholder in place of the mark."""
MARK_WITH_NEWLINES = re.compile(rf"(\n?(?:{'|'.join(map(re.escape, TYPES))})\n?)")
"""Splits a text into marks and what is between them."""

_LITERAL = re.compile(r"<(\\*)(image|video|audio)>")


def escape(text: str, marks: Collection[str] = tuple(TYPES)) -> str:
    """Return the text with its marks as literal text: the inverse of `unescape`. marks: those to escape."""
    return _LITERAL.sub(lambda match: f"<\\{match[0][1:]}" if f"<{match[2]}>" in marks else match[0], text)


def unescape(text: str) -> str:
    """Return the text without the backslashes that keep its marks from standing for media."""
    return _LITERAL.sub(lambda match: f"<{match[1][1:]}{match[2]}>", text)


def as_text(text: str, marks: Iterable[str]) -> str:
    """Return the text in which these marks are literal, also those that are already."""
    for mark in marks:
        text = text.replace(mark, escape(mark))
    return text


def count_marks(turns: Iterable[Turn], mark: str) -> int:
    """Return the number of occurrences of a mark in the text of turns."""
    return sum(turn.text.count(mark) for turn in turns)


def without_marks(text: str) -> str:
    """Return the text without any mark."""
    for mark in TYPES:
        text = text.replace(mark, "")
    return text


def check_marks(turns: Iterable[Turn], media: Mapping[str, int], literal: Collection[str] = ()) -> None:
    """Raise DataError unless turns have as many marks as there are images, videos and audio clips (`media`, by mark).

    literal: marks that may be text if there are no media of their kind.
    """
    turns = list(turns)
    for mark, name in NAMES.items():
        marks, expected = count_marks(turns, mark), media.get(mark, 0)
        if marks != expected and (expected or mark not in literal):
            raise DataError(f"{marks} {mark} in the conversation, but {expected} {name}s")
