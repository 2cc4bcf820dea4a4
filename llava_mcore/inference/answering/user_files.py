"""Images, videos and audio clips of a user's files as a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.processors.audio_files import audio_format, require_libraries
from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Audio, Conversation, Turn, Video
from llava_mcore.errors import DataError, problems
from llava_mcore.files.near_match import near_hint
from llava_mcore.files.regular import open_regular_file, read_regular_file
from llava_mcore.prepare.media.video_files import decode_video
from llava_mcore.prepare.row_types import BadSample
from llava_mcore.prepare.sampling import Sampling


def read_image(path: Path, limits: Limits) -> bytes:
    """Return the bytes of an image that can be decoded. DataError names the file."""
    try:
        data = read_regular_file(path, limits.sample_bytes)
        decode_image(data, limits.image_pixels)
    except DataError as error:
        text = str(error)
        raise DataError(text if str(path) in text else f"{path}: {text}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read: {reason}{near_hint(path)}") from error
    return data


def read_video(path: Path, limits: Limits, sampling: Sampling) -> Video:
    """Return frames of a video. DataError names the file."""
    try:
        with open_regular_file(path) as file:
            frames, fps, _ = decode_video(file, sampling, limits)
    except BadSample as error:
        raise DataError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read: {reason}{near_hint(path)}") from error
    return Video(tuple(frames), fps)


def read_audio(path: Path, limits: Limits) -> Audio:
    """Return an audio clip whose header can be read. DataError names the file."""
    try:
        require_libraries()
        data = read_regular_file(path, limits.sample_bytes)
        audio_format(data)
    except DataError as error:
        text = str(error)
        raise DataError(text if str(path) in text else f"{path}: {text}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}{near_hint(path)}") from error
    return Audio(data)


def asked_turn(question: str, num_images: int, num_videos: int, num_audios: int = 0) -> Turn:
    """Return a question after the marks of its images, videos and audio clips, unless it has marks itself, as `prepare`
    does.

    Raises:
        DataError: it is empty.
    """
    text = question.strip()
    counts = {IMAGE_MARK: num_images, VIDEO_MARK: num_videos, AUDIO_MARK: num_audios}
    rest = text
    for mark in counts:
        rest = rest.replace(mark, "")
    if not rest.strip():
        raise DataError("the question is empty")
    marks = [mark for mark, count in counts.items() if mark not in text for _ in range(count)]
    return Turn("user", "\n".join([*marks, text]))


@dataclass(frozen=True)
class MediaFiles:
    """The files of a question."""

    images: Sequence[Path] = ()
    videos: Sequence[Path] = ()
    audios: Sequence[Path] = ()


def conversation_of_files(question: str, files: MediaFiles, limits: Limits, sampling: Sampling) -> Conversation:
    """Return a question about images, videos and audio clips of files.

    Raises:
        DataError: lists everything that cannot be used.
    """
    errors: list[str] = []
    images = _read_all(files.images, lambda path: read_image(path, limits), errors)
    clips = _read_all(files.videos, lambda path: read_video(path, limits, sampling), errors)
    audios = _read_all(files.audios, lambda path: read_audio(path, limits), errors)
    try:
        turn = asked_turn(question, len(files.images), len(files.videos), len(files.audios))
    except DataError as error:
        errors.append(str(error))
    if errors:
        raise DataError(errors[0] if len(errors) == 1 else problems("the question cannot be asked", errors))
    return Conversation((turn,), tuple(images), videos=tuple(clips), audios=tuple(audios))


def _read_all[Media](paths: Sequence[Path], read: Callable[[Path], Media], errors: list[str]) -> list[Media]:
    """Return what can be read, and add why the rest cannot."""
    media = []
    for path in paths:
        try:
            media.append(read(path))
        except DataError as error:
            errors.append(str(error))
    return media
