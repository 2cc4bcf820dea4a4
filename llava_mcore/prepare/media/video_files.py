"""A video file -> frames as JPEGs, by PyAV, which contains FFmpeg's libraries.

Two passes: the first reads only the times of the frames and selects some, the second decodes the segments that have
some (see `video_packets`). Each chosen frame becomes a JPEG at once, so memory holds one decoded frame of ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.processors.image_header import ratio_problem
from llava_mcore.errors import DataError
from llava_mcore.prepare.media.class_frames import class_frames
from llava_mcore.prepare.media.item_options import WHOLE_CLIP, ClipOptions
from llava_mcore.prepare.media.video_packets import LostFrameError, VideoPackets, decoded, read_packets
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


class DecodedVideo(NamedTuple):
    """Frames of a video file as JPEGs, upright, and their number per second."""

    frames: list[bytes]
    fps: float
    header_problem: str | None
    """See `VideoPackets`."""


def decode_video(file: BinaryIO, sampling: Sampling, limits: Limits, options: ClipOptions = WHOLE_CLIP) -> DecodedVideo:
    """Return frames of a video file.

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
    try:
        with _opened(file) as container:
            packets = read_packets(container, _stream(container, limits))
        chosen, fps = _select(packets, options, sampling)
        if len(chosen) > limits.frames:
            raise BadSample(Reason.TOO_LARGE, f"{len(chosen)} frames; the limit is {limits.frames} (--max-frames)")
        try:
            frames = _decode(file, packets, chosen, limits, all_packets=False)
        except (LostFrameError, av.FFmpegError):  # a keyframe that is none, or the decoder needs what was skipped
            frames = _decode(file, packets, chosen, limits, all_packets=True)
    except (av.FFmpegError, ArithmeticError, LookupError, OSError, ValueError) as error:
        raise BadSample(Reason.VIDEO_BROKEN, f"{type(error).__name__}: {error}") from error
    return DecodedVideo(frames, fps, packets.header_problem)


def _opened(file: BinaryIO) -> InputContainer:
    import av

    return av.open(file, "r", options={"format_whitelist": CONTAINERS})


def select_frames(times: Sequence[Fraction], last_duration: Fraction, sampling: Sampling) -> tuple[list[int], float]:
    """Return the indices of the frames that a rule keeps, and their number per second: usually those that are shown at
    evenly spaced times.

    Args:
        times: in seconds, in ascending order.
        last_duration: how long the last frame is shown, in seconds.
    """
    duration = times[-1] + last_duration - times[0]
    if sampling.rule != "times":
        return class_frames(len(times), float(len(times) / duration), sampling)
    num_sampled = max(1, math.ceil(duration * Fraction(sampling.fps)))
    count = min(max(num_sampled, sampling.min_frames), sampling.max_frames, len(times))
    step = 1 / Fraction(sampling.fps) if count == num_sampled else duration / count
    chosen = [bisect_right(times, times[0] + step * i) - 1 for i in range(count)]
    return chosen, float(1 / step)


def _select(packets: VideoPackets, options: ClipOptions, sampling: Sampling) -> tuple[list[int], float]:
    """Return the indices of the frames of a video with options, and their number per second. Raises BadSample."""
    inside = options.window(packets.times)
    times, following = packets.times[inside], packets.times[inside.stop :]
    last_duration = following[0] - times[-1] if following else packets.last_duration
    chosen, fps = select_frames(times, last_duration, options.sampling(sampling))
    return [inside.start + index for index in chosen], fps


def _stream(container: InputContainer, limits: Limits) -> VideoStream:
    """Return the first video, its decoder limited to frames of the allowed size."""
    if not container.streams.video:
        raise BadSample(Reason.VIDEO_BROKEN, "it has no images")
    stream = container.streams.video[0]
    _check_size(stream.codec_context.width, stream.codec_context.height, limits)
    stream.codec_context.options = {"max_pixels": str(limits.image_pixels)}
    return stream


def _decode(
    file: BinaryIO, packets: VideoPackets, chosen: Sequence[int], limits: Limits, *, all_packets: bool
) -> list[bytes]:
    """Return the chosen frames as JPEGs. One may be chosen several times, where the times between frames vary."""
    order = packets.names(chosen)
    encoded, num_bytes, expected = dict[int, bytes](), 0, len(set(order))
    file.seek(0)
    with _opened(file) as container:
        stream = _stream(container, limits)
        for stamp, frame in decoded(container, stream, packets, order, all_packets=all_packets):
            encoded[stamp] = _jpeg(frame, limits)
            num_bytes += len(encoded[stamp])
            if num_bytes > limits.sample_bytes:
                raise BadSample(
                    Reason.TOO_LARGE, f"its frames have more than {limits.sample_bytes} bytes (--max-sample-bytes)"
                )
    if len(encoded) < expected:
        raise BadSample(Reason.VIDEO_BROKEN, f"only {len(encoded)} of {expected} frames could be decoded")
    return [encoded[stamp] for stamp in order]


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
    if width * height > limits.image_pixels:
        limit = f"the limit is {limits.image_pixels} (--max-image-pixels)"
        raise BadSample(Reason.TOO_LARGE, f"frames of {width} x {height} pixels; {limit}")
    problem = ratio_problem((height, width))
    if problem is not None:
        raise BadSample(Reason.SHAPE, f"a frame cannot be used: {problem}")
