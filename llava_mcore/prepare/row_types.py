"""Data types of the importer's steps, and the reasons for skipping a row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from llava_mcore.data.encode.record_keys import DifferingError, NothingTrainedError
from llava_mcore.data.samples import Turn
from llava_mcore.errors import DataError


class Reason(StrEnum):
    """Why a row is skipped; the values are what users read and count."""

    NOT_JSON = "row is not a JSON object"
    NOT_UTF8 = "text is not UTF-8"
    WRONG_TYPE = "wrong type"
    NO_CONVERSATION = "no conversation"
    UNKNOWN_ROLE = "unknown role"
    ROLE_ORDER = "wrong role order"
    NO_ANSWER = "no assistant turn"
    EMPTY_QUESTION = "empty question"
    EMPTY_ANSWER = "empty answer"
    PAIR = "preference pair"
    SAME_ANSWERS = "chosen and rejected answers are the same"
    NOTHING_TRAINED = "no answer is trained"
    KEY = "a field that cannot be honored"
    DIFFERENT = "two fields that differ"
    MARKS = "marks and media differ"
    IMAGE_MISSING = "image missing"
    IMAGE_REMOTE = "image not on disk"
    IMAGE_BROKEN = "image cannot be decoded"
    IMAGE_FORMAT = "image format not supported"
    VIDEO_MISSING = "video missing"
    VIDEO_REMOTE = "video not on disk"
    VIDEO_BROKEN = "video cannot be decoded"
    NO_FRAMES = "video without frames"
    FRAME_SIZES = "frames of several sizes"
    NO_VIDEOS = "the model takes no videos"
    NO_IMAGES = "the model takes no images"
    NO_AUDIOS = "the model takes no audio"
    AUDIO_MISSING = "audio missing"
    AUDIO_REMOTE = "audio not on disk"
    AUDIO_BROKEN = "audio cannot be decoded"
    AUDIO_LENGTH = "audio too long or too short for the model"
    SHAPE = "image or video of a shape that the model does not take"
    TEMPLATE = "chat template refuses"
    TOO_LONG = "longer than a pack"
    TOO_LARGE = "more than is allowed"


class BadSample(Exception):
    """A row that cannot become a sample. It is caught for every row, and counted."""

    def __init__(self, reason: Reason, detail: str, value: str = "") -> None:
        """value: what is counted by itself, such as an unknown role."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.value = value


@contextlib.contextmanager
def reason_for(reason: Reason) -> Iterator[None]:
    """Raise a DataError of the code inside as a BadSample with this reason, unless the error has one of its own."""
    try:
        yield
    except DifferingError as error:
        raise BadSample(Reason.DIFFERENT, str(error)) from error
    except NothingTrainedError as error:
        raise BadSample(Reason.NOTHING_TRAINED, str(error)) from error
    except DataError as error:
        raise BadSample(reason, str(error)) from error


def type_and_value(value: Any) -> str:
    """Return a value of a wrong type as messages show it."""
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one source file that belong to one shard."""

    file: int
    """Index of the source's file."""
    row: int
    """Number of the first row, counted over all files of the source."""
    index: int
    """Number of the first row within the file."""
    count: int
    """Rows."""
    start: int = 0
    stop: int = 0
    """Bytes of the file that contain the rows; 0 if rows are found by their number."""


@dataclass(frozen=True, slots=True)
class ShuffledRows:
    """Rows at consecutive positions of a shuffled source (`shuffle.ShuffledOrder`)."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row of a source, or why it cannot be read."""

    index: int
    """Number within its file."""
    data: Mapping[str, Any] | BadSample
    unread: tuple[str, ...] = ()
    """Names of columns that were not read from a table."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A parsed row: its turns, and references to its media (paths, URIs, bytes, lists)."""

    turns: tuple[Turn, ...]
    images: tuple[Any, ...]
    videos: tuple[Any, ...] = ()
    audios: tuple[Any, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    unused: frozenset[str] = frozenset()
    """Keys that nothing reads, as they are reported."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An encoded image."""

    data: bytes
    extension: str
    size: tuple[int, int]
    """Width and height in pixels, upright."""


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """A video's frames, all of one size, and frames per second (None: unknown)."""

    frames: tuple[ImageFile, ...]
    fps: float | None
    header_problem: str | None = None
    """The problem of the number of frames in the header of a video file."""


@dataclass(frozen=True, slots=True)
class AudioFile:
    """An encoded audio clip."""

    data: bytes
    extension: str
    seconds: float


@dataclass(frozen=True, slots=True)
class OtherAnswer:
    """The conversation with the rejected answer of a preference pair, about the same images, videos and audio clips."""

    turns: tuple[Turn, ...]
    num_tokens: int | None
    tokens: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class CheckedConversation:
    """A checked conversation, ready to be written."""

    row: int
    """Number over all files of the source."""
    turns: tuple[Turn, ...]
    images: tuple[ImageFile, ...]
    num_tokens: int | None
    tokens: Mapping[str, Any] | None
    """As in the json (see `stored_tokens`)."""
    source: Mapping[str, Any]
    """file, index, id"""
    typed: tuple[str, ...] = ()
    """Special tokens in the text of its turns."""
    videos: tuple[VideoFrames, ...] = ()
    audios: tuple[AudioFile, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks that the summary counts: `FILLED`, `THOUGHTLESS`, `MISCOUNTED`."""
    rejected: OtherAnswer | None = None
    """In a preference pair, what these turns are preferred to."""


FRAMES_FORM = 'frames of one video are a list of their own: [["1.jpg", "2.jpg"]], or {"frames": ["1.jpg", "2.jpg"]}'
"""Advice for rows that list frames as if each were a video."""
FILLED = "filled"
"""Note: the template has written its own text into what is trained of an answer."""
THOUGHTLESS = "thoughtless"
"""Note: the template does not render the reasoning."""
MISCOUNTED = "miscounted"
"""Note: the header of a video file has another number of frames than the file."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """One line of skipped.jsonl."""

    file: str
    index: int
    id: str
    reason: str
    detail: str

    def __str__(self) -> str:
        named = f" ({self.id})" if self.id else ""
        return f"{self.file}, row {self.index}{named}: {self.reason}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Return the line's fields."""
        return asdict(self)
