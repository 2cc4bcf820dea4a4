"""A reference to a video -> its frames as images: a list of images, or a video file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.encode.sample_media import FRAMES_KEY
from llava_mcore.data.samples import IMAGE_PARTS
from llava_mcore.files.near_match import shortened
from llava_mcore.files.regular import RefusedFileError, open_regular_file
from llava_mcore.prepare.media.images import inspect, read_image
from llava_mcore.prepare.media.item_options import ClipOptions, clip_options
from llava_mcore.prepare.media.references import VIDEO, cannot_open, resolve
from llava_mcore.prepare.media.video_files import decode_video
from llava_mcore.prepare.row_types import FRAMES_FORM, BadSample, ImageFile, Reason, VideoFrames
from llava_mcore.prepare.sampling import Sampling


def read_video(
    reference: Any,
    folder: Path,
    sampling: Sampling,
    limits: Limits,
    *,
    frames_fps: float | None = None,
    decode: bool = False,
) -> VideoFrames:
    """Find a video and return its frames.

    Args:
        reference: a list of images (see `read_image`), {"frames": such a list, "fps": number}; or a video file:
            see `resolve`. A mapping may have options too (see `clip_options`).
        sampling: which frames of a video file are kept.
        frames_fps: frames per second of a list of frames that does not say it; None: unknown.
        decode: decode images that are listed, to see whether they are whole.

    Raises:
        BadSample: it is missing, not on disk, broken, without frames, or its frames are too large or of several sizes.
        DataError: it is a video file, and PyAV is not installed.
    """
    # Frames are decoded from a file, or read from images that the row lists.
    header_problem = None
    listed, options = _listed(reference), clip_options(reference)
    fps = frames_fps if options.fps is None else options.fps
    if listed is None:
        with _opened(reference, folder) as file:
            images, fps, header_problem = decode_video(file, sampling, limits, options)
        frames = tuple(ImageFile(data, *inspect(data, limits)) for data in images)
    else:
        if options != ClipOptions(fps=options.fps):
            raise BadSample(Reason.WRONG_TYPE, "a list of frames has options of a video file; only fps can be given")
        frames = tuple(read_image(frame, folder, decode=decode, limits=limits) for frame in listed)
    # Towers take frames of one size.
    if not frames:
        raise BadSample(Reason.NO_FRAMES, "a video lists no frames")
    for index, frame in enumerate(frames):
        if frame.size != frames[0].size:
            sizes = " and ".join(f"{width} x {height}" for width, height in (frames[0].size, frame.size))
            raise BadSample(Reason.FRAME_SIZES, f"frames 0 and {index} of a video have {sizes} pixels")
    return VideoFrames(frames, fps, header_problem)


def _listed(reference: Any) -> Sequence[Any] | None:
    """Return the frames that are listed; None for a video file."""
    if isinstance(reference, Mapping) and reference.get(FRAMES_KEY) is not None:
        reference = reference[FRAMES_KEY]
        if not isinstance(reference, (list, tuple)):
            raise BadSample(Reason.WRONG_TYPE, f"the frames of a video are {reference!r:.60}, not a list")
    return reference if isinstance(reference, (list, tuple)) else None


def _opened(reference: Any, folder: Path) -> BinaryIO:
    source = resolve(reference, folder, VIDEO)
    if isinstance(source, bytes):
        return BytesIO(source)
    if source.suffix.lstrip(".").lower() in IMAGE_PARTS and source.suffix.lower() != ".gif":
        raise BadSample(Reason.WRONG_TYPE, f"a video is the image {shortened(str(reference))}; {FRAMES_FORM}")
    try:
        return open_regular_file(source)
    except (OSError, ValueError, RefusedFileError) as error:
        raise cannot_open(source, error, VIDEO) from error
