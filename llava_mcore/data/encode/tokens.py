"""The tokens of a conversation: of its text, as `prepare` stores them, and with those of its media.

A text has one placeholder per image, video and audio clip. It is expanded to the tokens of the model's plan, for which
only headers of media are read.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from numpy.typing import NDArray
from tokenizers import Encoding

from llava_mcore.config.sections.data import LIMITS, PixelRange
from llava_mcore.data.processors.audio_files import audio_length
from llava_mcore.data.processors.image_header import image_size
from llava_mcore.data.samples import Audio, Turn, Video
from llava_mcore.errors import DataError
from llava_mcore.media.media import MediaPlan, MediaTokens, Size, VideoShape


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A tokenized conversation of m tokens in which every image and video is one placeholder."""

    ids: NDArray[np.int64]
    """[m]"""
    trained: NDArray[np.bool_]
    """[m]; True if the model is trained to predict this token (not the one after it)."""
    typed: tuple[str, ...] = ()
    """Special tokens in the text of its turns."""
    num_filled: int = 0
    """Trained answers before which the template has written its own text (`ChatText.own_text`)."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A tokenized conversation of n tokens with k images and videos, each as its own tokens."""

    input_ids: NDArray[np.int64]
    """[n]"""
    trained: NDArray[np.bool_]
    """[n]"""
    starts: NDArray[np.int64]
    """[k]; start of each image or video."""
    typed: tuple[str, ...] = ()
    """Special tokens in the text of its turns; empty if its tokens were stored."""


Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


def tokens_in_span(encoding: Encoding, span: Span, length: int) -> slice:
    """Return the tokens that overlap with the characters of a span. `length`: number of characters of the text.

    All byte tokens of one character carry that character's offsets, so none of them is lost. A white-space token
    whose offsets were trimmed to nothing ends at its right edge. Only single characters are looked up, because
    fetching the offsets of all tokens takes a fifth of the time of tokenizing.
    """
    start, end = span
    first, after = (_token_at(encoding, char, length) for char in span)
    while _is_trimmed(encoding, first - 1, after_char=start):
        first -= 1
    chars = encoding.token_to_chars(after) if after < len(encoding) else None
    if chars is not None and chars[0] < end:
        return slice(first, after + 1)
    while _is_trimmed(encoding, after - 1, after_char=end):
        after -= 1
    return slice(first, after)


def _token_at(encoding: Encoding, start: int, length: int) -> int:
    """Return the first token of the first character from start on that has one, or the number of all tokens."""
    tokens = (encoding.char_to_token(char) for char in range(start, length))
    return next((token for token in tokens if token is not None), len(encoding))


def _is_trimmed(encoding: Encoding, token: int, *, after_char: int) -> bool:
    """Return whether a token has no characters left and ends after the given one."""
    chars = encoding.token_to_chars(token) if token >= 0 else None
    return chars is not None and chars[0] == chars[1] > after_char


NO_SIZE: Size = (0, 0)
"""Size of an image if the tokens do not depend on it."""


def media_tokens(images: Sequence[bytes], plan: MediaPlan, most_pixels: int) -> list[MediaTokens]:
    """Return the tokens of the images of one conversation; only headers are read, and only if sizes matter.

    Raises:
        DataError: an image whose size cannot be read, or that has more than most_pixels.
    """
    return plan.tokens([image_size(data, most_pixels) if plan.any_size else NO_SIZE for data in images])


def video_tokens(videos: Sequence[Video], plan: MediaPlan, most_pixels: int) -> list[MediaTokens]:
    """Return the tokens of the videos of one conversation; only the headers of their frames are read.

    Raises:
        DataError: a frame whose size cannot be read, has more than most_pixels or another size than the first one.
    """
    if not videos:
        return []
    return plan.video_tokens([video_shape(video, index, most_pixels) for index, video in enumerate(videos)])


def video_shape(video: Video, video_index: int = 0, most_pixels: int = LIMITS.image_pixels) -> VideoShape:
    """Return the shape that determines a video's tokens. DataError like `video_tokens`; `video_index`: for
    messages."""
    first: Size | None = None
    for index, frame in enumerate(video.frames):
        try:
            size = image_size(frame, most_pixels)
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


def audio_tokens(audios: Sequence[Audio], plan: MediaPlan) -> list[MediaTokens]:
    """Return the tokens of the audio clips of one conversation; only their headers are read.

    Raises:
        DataError: an audio clip whose length cannot be read, or that is longer than the model takes.
    """
    if not audios:
        return []
    return plan.audio_tokens([audio_length(audio.data, plan.sampling_rate) for audio in audios])


def in_order[T](
    ids: NDArray[np.int64], images: Sequence[T], videos: Sequence[T], audios: Sequence[T], plan: MediaPlan
) -> list[T]:
    """Return the items of images, videos and audio clips in the order of their placeholders in a text.

    A template may put all images of a turn before its videos; no kind changes its order.
    """
    queues = {
        plan.image_token_id: iter(images),
        plan.video_token_id: iter(videos),
        plan.audio_token_id: iter(audios),
    }
    return [next(queues[i]) for i in ids[_places(ids, plan.placeholders)].tolist()]


def expand(tokens: TextTokens, placeholders: Sequence[int], media: Sequence[MediaTokens]) -> ChatTokens:
    """Expand every placeholder to its image's, video's or audio clip's tokens, which are never trained.

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


TOKENS_KEY = "prepared_tokens"
"""Key in a conversation's json."""
DIGEST_KEY = "of"
"""Key in that entry: the digest of the turns. Entries of earlier versions have none, so it is unknown whether the
text was changed afterwards; they are not used."""
ORIGIN_FILE = "tokens.json"
"""File in .nv-meta: the fingerprint of the tokens in the latest shards, and the pixel ranges that they were counted
with."""
RANGES = {
    "pixels": ("images", "--min-pixels", "--max-pixels"),
    "video_pixels": ("frames", "--video-min-pixels", "--video-max-pixels"),
}
"""Keys in that file, and in `Assets`."""

logger = logging.getLogger(__name__)


def to_json(tokens: TextTokens, fingerprint: str, digest: str) -> dict[str, Any]:
    """Return the entry for the json.

    "by" is the fingerprint of the tokenizer and template, "of" the digest of the turns, "ids" are little-endian uint32
    in base64, "trained" lists the bounds of the trained spans: [start, end, start, end, …].
    """
    ends = np.flatnonzero(np.diff(tokens.trained, prepend=False, append=False))
    ids = b64encode(tokens.ids.astype("<u4").tobytes()).decode("ascii")
    return {"by": fingerprint, DIGEST_KEY: digest, "ids": ids, "trained": ends.tolist()}


def digest_of(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a hash of everything in a conversation that its tokens depend on."""
    content = [[turn.role, turn.text, turn.trained, turn.reasoning, dict(turn.fields)] for turn in turns]
    text = json.dumps([content, list(tools)], default=str)
    return blake2b(text.encode("ascii"), digest_size=12).hexdigest()


def is_by(stored: Any, fingerprint: str) -> bool:
    """Return whether these are tokens of the tokenizer and template with that fingerprint."""
    return isinstance(stored, dict) and stored.get("by") == fingerprint


def is_of(stored: dict[str, Any], turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Return whether these are tokens of exactly these turns. False for tokens that were stored without a digest."""
    return DIGEST_KEY in stored and stored[DIGEST_KEY] == digest_of(turns, tools)


def from_json(stored: dict[str, Any]) -> TextTokens:
    """The inverse of `to_json`. DataError if they are damaged."""
    try:
        ids = np.frombuffer(b64decode(stored["ids"]), "<u4").astype(np.int64)
        trained = np.zeros(len(ids), dtype=np.bool_)
        ends = iter(stored["trained"])
        for start, end in zip(ends, ends, strict=True):
            trained[start:end] = True
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"its {TOKENS_KEY} cannot be read ({error!r}); prepare the data again") from error
    return TextTokens(ids, trained)


def log_origin(datasets: Iterable[Path | EPath], fingerprint: str) -> None:
    """Log for every dataset with stored tokens whether they are used."""
    for dataset in datasets:
        file = dataset / ".nv-meta" / ORIGIN_FILE
        if not file.is_file():
            continue
        origin = json.loads(file.read_text())
        if is_by(origin, fingerprint) and DIGEST_KEY in origin:
            logger.info("%s: stored tokens are used", dataset)
        elif is_by(origin, fingerprint):
            logger.info(
                "%s: its tokens were prepared by an earlier version, which did not record the text that they belong "
                "to, so they are computed again during training, which takes CPU time; prepare the data again to save "
                "it",
                dataset,
            )
        else:
            logger.info(
                "%s: tokens were prepared with another tokenizer or chat template, so they are computed again during "
                "training, which takes CPU time; prepare the data again to save it",
                dataset,
            )


def origin_of(fingerprint: str, ranges: Mapping[str, PixelRange]) -> dict[str, Any]:
    """Return the content of ORIGIN_FILE. `ranges`: by the keys of RANGES; empty ones are left out."""
    listed = {key: [pixels.smallest, pixels.largest] for key, pixels in ranges.items() if pixels != PixelRange()}
    return {"by": fingerprint, DIGEST_KEY: "turns", **listed}


def warn_of_other_pixels(datasets: Iterable[Path | EPath], ranges: Mapping[str, PixelRange]) -> None:
    """Warn about every dataset whose tokens were counted with another range of pixels than training resizes to."""
    for dataset in datasets:
        file = dataset / ".nv-meta" / ORIGIN_FILE
        origin = json.loads(file.read_text()) if file.is_file() else {}
        for key, (name, *flags) in RANGES.items():
            pixels = ranges[key]
            current = [pixels.smallest, pixels.largest]
            if key not in origin or pixels == PixelRange() or origin[key] == current:
                continue
            smallest, largest = origin[key]
            logger.warning(
                "%s: its tokens were counted with %s of %s to %s pixels, but this run resizes them to %s to %s: lengths"
                " and packs differ from those that prepare reported; give %s %s %s %s, or prepare the data again",
                *(dataset, name, smallest, largest, *current, flags[0], smallest, flags[1], largest),
            )
