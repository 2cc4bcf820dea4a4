"""Pictures and videos of a user's files as a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.encoding.images import decode_image
from llava_mcore.data.prepare.media.video_files import decode_video
from llava_mcore.data.prepare.records import BadSample
from llava_mcore.data.prepare.sampling import Sampling
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK, Conversation, Turn, Video
from llava_mcore.errors import DataError, problems
from llava_mcore.files.regular import open_regular_file, read_regular_file


def read_picture(path: Path, limits: Limits) -> bytes:
    """Return the bytes of a picture that can be decoded. DataError names the file."""
    try:
        data = read_regular_file(path, limits.sample_bytes)
        decode_image(data, limits.picture_pixels)
    except DataError as error:
        text = str(error)
        raise DataError(text if str(path) in text else f"{path}: {text}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read: {reason}") from error
    return data


def read_video(path: Path, limits: Limits, sampling: Sampling) -> Video:
    """Return frames of a video. DataError names the file."""
    try:
        with open_regular_file(path) as file:
            frames, fps = decode_video(file, sampling, limits)
    except BadSample as error:
        raise DataError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read: {reason}") from error
    return Video(tuple(frames), fps)


def asked_turn(question: str, num_images: int, num_videos: int) -> Turn:
    """Return a question after the marks of its pictures and videos, unless it has marks itself, as `prepare` does.

    Raises:
        DataError: it is empty.
    """
    text = question.strip()
    if not text.replace(IMAGE_MARK, "").replace(VIDEO_MARK, "").strip():
        raise DataError("the question is empty")
    marks = [] if IMAGE_MARK in text else [IMAGE_MARK] * num_images
    marks += [] if VIDEO_MARK in text else [VIDEO_MARK] * num_videos
    return Turn("user", "\n".join([*marks, text]))


def conversation_of_files(
    question: str, images: Sequence[Path], videos: Sequence[Path], limits: Limits, sampling: Sampling
) -> Conversation:
    """Return a question about pictures and videos of files.

    Raises:
        DataError: lists everything that cannot be used.
    """
    found, pictures, clips = [], [], []
    for path in images:
        try:
            pictures.append(read_picture(path, limits))
        except DataError as error:
            found.append(str(error))
    for path in videos:
        try:
            clips.append(read_video(path, limits, sampling))
        except DataError as error:
            found.append(str(error))
    try:
        turn = asked_turn(question, len(images), len(videos))
    except DataError as error:
        found.append(str(error))
    if found:
        raise DataError(found[0] if len(found) == 1 else problems("the question cannot be asked", found))
    return Conversation((turn,), tuple(pictures), videos=tuple(clips))
