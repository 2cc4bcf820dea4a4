"""A video file -> frames as JPEGs, by PyAV, which contains FFmpeg's libraries.

Two passes: the first reads only the times of the frames and selects some, the second decodes up to the last of these.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.processors.image_header import ratio_problem
from llava_mcore.errors import DataError
from llava_mcore.prepare.media.item_options import WHOLE_CLIP, ClipOptions
from llava_mcore.prepare.row_types import BadSample, Reason
from llava_mcore.prepare.sampling import Sampling

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

CONTAINERS = "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif"
"""FFmpeg's names of the formats that are read (mov: mp4 too; matroska: webm too). Playlists are not among them: they
name other files, or addresses, which FFmpeg would open."""
QUALITY = 95
"""Quality of the JPEGs."""
NO_PYAV = 'video files are read by PyAV: pip install "llava-mcore[video]", or list the frames of each video as images'


def decode_video(
    file: BinaryIO, sampling: Sampling, limits: Limits, options: ClipOptions = WHOLE_CLIP
) -> tuple[list[bytes], float]:
    """Return frames as JPEGs, upright, and their number per second.

    Args:
        file: opened for reading.
        options: those of this video, which replace what `sampling` says.

    Raises:
        BadSample: it is not a video of a supported format, is damaged, or its frames are larger than allowed.
        DataError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise DataError(NO_PYAV) from error
    formats = {"format_whitelist": CONTAINERS}
    try:
        with av.open(file, "r", options=formats) as container:
            clock = _clock(container, _stream(container, limits))
        chosen, fps = _select(clock, options, sampling)
        file.seek(0)
        with av.open(file, "r", options=formats) as container:
            frames = _decode(container, _stream(container, limits), clock, chosen, limits)
    except (av.FFmpegError, ArithmeticError, LookupError, OSError, ValueError) as error:
        raise BadSample(Reason.VIDEO_BROKEN, f"{type(error).__name__}: {error}") from error
    return frames, fps


def select_frames(times: list[Fraction], last_duration: Fraction, sampling: Sampling) -> tuple[list[int], float]:
    """Return the indices of the frames that are shown at evenly spaced times, and their number per second.

    Args:
        times: in seconds, in ascending order.
        last_duration: how long the last frame is shown, in seconds.
    """
    duration = times[-1] + last_duration - times[0]
    num_sampled = max(1, math.ceil(duration * Fraction(sampling.fps)))
    count = min(max(num_sampled, sampling.min_frames), sampling.max_frames, len(times))
    step = 1 / Fraction(sampling.fps) if count == num_sampled else duration / count
    chosen = [bisect_right(times, times[0] + step * i) - 1 for i in range(count)]
    return chosen, float(1 / step)


def _select(clock: _Clock, options: ClipOptions, sampling: Sampling) -> tuple[list[int], float]:
    """Return the indices of the frames of a video with options, and their number per second. Raises BadSample."""
    inside = options.window(clock.seconds)
    times, following = clock.seconds[inside], clock.seconds[inside.stop :]
    last_duration = following[0] - times[-1] if following else clock.last_duration
    chosen, fps = select_frames(times, last_duration, options.sampling(sampling))
    return [inside.start + index for index in chosen], fps


def _stream(container: InputContainer, limits: Limits) -> VideoStream:
    """Return the first video, its decoder limited to frames of the allowed size."""
    if not container.streams.video:
        raise BadSample(Reason.VIDEO_BROKEN, "it has no images")
    stream = container.streams.video[0]
    _check_size(stream.codec_context.width, stream.codec_context.height, limits)
    stream.codec_context.options = {"max_pixels": str(limits.picture_pixels)}
    return stream


@dataclass(frozen=True, slots=True)
class _Clock:
    """When each frame is shown, in their order."""

    seconds: list[Fraction]
    last_duration: Fraction
    stamps: list[int] | None
    """The time stamps by which the decoder identifies frames; None: a file has no times, so by their order."""


def _clock(container: InputContainer, stream: VideoStream) -> _Clock:
    """Read through the packets, decoding none."""
    stamps = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
    if not stamps:
        raise BadSample(Reason.VIDEO_BROKEN, "it has no frames")
    rate = stream.average_rate or stream.guessed_rate
    gap = Fraction(rate.denominator, rate.numerator) if rate else Fraction(1, 25)
    unit = stream.time_base
    if None in stamps or not unit:
        return _Clock([i * gap for i in range(len(stamps))], gap, None)
    known = sorted(stamp for stamp in stamps if stamp is not None)
    return _Clock([Fraction(stamp * unit.numerator, unit.denominator) for stamp in known], gap, known)


def _decode(
    container: InputContainer, stream: VideoStream, clock: _Clock, chosen: list[int], limits: Limits
) -> list[bytes]:
    """Return the chosen frames as JPEGs. One may be chosen several times, where the times between frames vary."""
    order = chosen if clock.stamps is None else [clock.stamps[i] for i in chosen]
    expected, encoded, num_bytes = set(order), dict[int, bytes](), 0
    for index, frame in enumerate(container.decode(stream)):
        stamp = index if clock.stamps is None else frame.pts
        if stamp is None or stamp not in expected or stamp in encoded:
            continue
        encoded[stamp] = _jpeg(frame, limits)
        num_bytes += len(encoded[stamp])
        if num_bytes > limits.sample_bytes:
            raise BadSample(
                Reason.TOO_LARGE, f"its frames have more than {limits.sample_bytes} bytes (--max-sample-bytes)"
            )
        if len(encoded) == len(expected):
            return [encoded[stamp] for stamp in order]
    raise BadSample(Reason.VIDEO_BROKEN, f"only {len(encoded)} of {len(expected)} frames could be decoded")


def _jpeg(frame: VideoFrame, limits: Limits) -> bytes:
    """Return a frame as a player shows it: cameras store how they were held separately from the images."""
    _check_size(frame.width, frame.height, limits)
    image = frame.to_image()
    if frame.rotation % 360:
        image = image.rotate(round(frame.rotation / 90) * 90, expand=True)
    buffer = BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def _check_size(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.picture_pixels:
        limit = f"the limit is {limits.picture_pixels} (--max-picture-pixels)"
        raise BadSample(Reason.TOO_LARGE, f"frames of {width} x {height} pixels; {limit}")
    problem = ratio_problem((height, width))
    if problem is not None:
        raise BadSample(Reason.SHAPE, f"a frame cannot be used: {problem}")
