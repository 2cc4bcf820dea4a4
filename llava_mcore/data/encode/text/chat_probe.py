"""Determines how a chat template renders pictures, videos and sounds, by rendering a question about one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from llava_mcore.data.encode.marks import NAMES
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError

QUESTION, ANSWER, SYSTEM = "probe-question-q7", "probe-answer-a7", "probe-system-s7"
Render = Callable[[Sequence[Turn], dict[str, str]], str]
"""Turns and the content format of each role (see `text.render.CONTENT_FORMATS`) -> text."""


def probe(mark: str = IMAGE_MARK) -> list[Turn]:
    """Return a question about a picture, a video or a sound, and its answer."""
    return [Turn("user", f"{mark}\n{QUESTION}"), Turn("assistant", ANSWER)]


def find_content_format(render: Render, formats: Iterable[dict[str, str]], mark: str, token: str) -> dict[str, str]:
    """Return the first format that the template supports, preferably with a system prompt.

    Args:
        mark: of a picture, or of a sound for a class that takes sound alone.
        token: its placeholder.

    Raises DataError if it does not support any.
    """
    possible, reasons = [], []
    for candidate in formats:
        try:
            text = render(probe(mark), candidate)
        except DataError as error:
            reasons.append(str(error))
            continue
        if _is_said(text, token):
            possible.append(candidate)
        else:
            reasons.append(f"typed or plain content {candidate} renders as {text!r}")
    if possible:
        return next((candidate for candidate in possible if _says_system(render, candidate, mark)), possible[0])
    raise DataError(
        f"the chat template renders a question with a {NAMES[mark]} neither from typed parts nor from text with "
        f"{token}: " + "; ".join(dict.fromkeys(reasons))
    )


def why_no_videos(render: Render, content_format: dict[str, str], video_token: str) -> str | None:
    """Return why the template cannot render a question about a video; None: it can."""
    try:
        text = render(probe(VIDEO_MARK), content_format)
    except DataError as error:
        return str(error)
    if _is_said(text, video_token):
        return None
    return f"the chat template renders a question about a video as {text!r}, where one {video_token} is needed"


def _is_said(text: str, placeholder: str) -> bool:
    """Return whether the text contains all of the probe once, and not as a printed Python list."""
    return all(text.count(part) == 1 for part in (placeholder, QUESTION, ANSWER)) and "'type':" not in text


def _says_system(render: Render, content_format: dict[str, str], mark: str) -> bool:
    """Return whether a system prompt is rendered; a template may not support it."""
    try:
        text = render([Turn("system", SYSTEM), *probe(mark)], content_format)
    except DataError:
        return False
    return text.count(SYSTEM) == 1 and "'type':" not in text
