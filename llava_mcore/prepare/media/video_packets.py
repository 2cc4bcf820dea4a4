"""The packets of a video file: the times of its frames, and which packets have to be decoded for some of them.

Nothing is decoded for the times. For the chosen frames, packets are decoded from the keyframe before each of them, and
those of segments without a chosen frame are read past. The file is never sought in: demuxers find places by time, and
in MPEG files and AVIs not exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from llava_mcore.prepare.row_types import BadSample, Reason

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

RANDOM_ACCESS = frozenset(
    ("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "libvpx-vp9", "mpeg1video", "mpeg2video", "mpeg4", "mjpeg")
)
"""FFmpeg's names of the decoders that decode exactly from a keyframe on; a GIF's frames change the ones before."""
FEWEST_SKIPPED = 16
"""Packets that are decoded rather than skipped, as a decoder that starts again has its frames later."""
NO_RATE = Fraction(1, 25)
"""Seconds that the last frame is shown in a file that says nothing about it."""


@dataclass(frozen=True, slots=True)
class FrameTimes(Sequence[Fraction]):
    """The times of frames in seconds, ascending. Only timestamps are kept, because a film has 200,000 frames."""

    stamps: NDArray[np.int64]
    unit: Fraction
    """Seconds of a step of the stamps."""

    def __len__(self) -> int:
        return len(self.stamps)

    @overload
    def __getitem__(self, index: int) -> Fraction: ...
    @overload
    def __getitem__(self, index: slice) -> FrameTimes: ...
    def __getitem__(self, index: int | slice) -> Fraction | FrameTimes:
        if isinstance(index, slice):
            return FrameTimes(self.stamps[index], self.unit)
        return int(self.stamps[index]) * self.unit


@dataclass(frozen=True, slots=True)
class VideoPackets:
    """The frames of a video, as its packets give them."""

    times: FrameTimes
    """Those of the frames in the order in which they are shown."""
    last_duration: Fraction
    """How long the last frame is shown, in seconds."""
    has_stamps: bool
    """Whether frames are identified by their stamps; otherwise some have none, or the same, and they have numbers."""
    stored: NDArray[np.int64]
    """Stamps of all packets in the order of the file; of those that are not shown too."""
    keyframes: NDArray[np.int64]
    """Numbers of the packets from which on the decoder needs none before; empty if it has to begin with the first."""
    header_count: int
    """Frames of the file as its header says; 0: it does not."""

    def names(self, indices: Sequence[int]) -> list[int]:
        """Return what identifies frames in `decoded`: their stamps or numbers."""
        return self.times.stamps[list(indices)].tolist() if self.has_stamps else list(indices)

    @property
    def header_problem(self) -> str | None:
        """The problem with the header's number of frames."""
        count = len(self.stored)
        if self.header_count in (0, count):
            return None
        return f"the header says {self.header_count} frames, but the file has {count}"


def read_packets(container: InputContainer, stream: VideoStream) -> VideoPackets:
    """Read through the packets, decoding none. BadSample if there are none, or the file ends before its last ones."""
    stored: list[int | None] = []
    visible: list[int | None] = []
    keyframes: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.is_keyframe:
            keyframes.append(len(stored))
        stored.append(packet.pts)
        if not packet.is_discard:
            visible.append(packet.pts)
    if not visible:
        raise BadSample(Reason.VIDEO_BROKEN, "it has no frames")
    # How long a frame is shown, and the step of the timestamps.
    rate, unit = stream.average_rate or stream.guessed_rate, stream.time_base
    gap = Fraction(rate.denominator, rate.numerator) if rate else NO_RATE
    known = [stamp for stamp in stored if stamp is not None]
    if len(known) < len(stored) or not unit:
        indices, no_keyframes = np.arange(len(visible)), np.empty(0, np.int64)
        return VideoPackets(FrameTimes(indices, gap), gap, False, np.arange(len(stored)), no_keyframes, stream.frames)
    times = FrameTimes(np.sort(np.array(visible, np.int64)), Fraction(unit.numerator, unit.denominator))
    packets = np.array(known, np.int64)
    # Stamps that occur twice do not tell frames apart.
    is_exact = len(np.unique(packets)) == len(packets)
    starts = np.array(keyframes if is_exact and stream.codec_context.name in RANDOM_ACCESS else [], np.int64)
    result = VideoPackets(times, gap, is_exact, packets, starts, stream.frames)
    # The table of an MP4 has every frame: what is missing in the file was cut off.
    if container.format.name.startswith("mov") and stream.frames > len(packets):
        raise BadSample(Reason.VIDEO_BROKEN, f"{result.header_problem}: it was cut off")
    return result


def segments_of(packets: VideoPackets, stamps: Sequence[int]) -> list[tuple[int, frozenset[int]]]:
    """Return the segments that have to be decoded: the number of the first packet, and the chosen frames in it.

    A frame that is shown before a keyframe but stored after it may need frames from before the keyframe. So it belongs
    to the segment of a keyframe that is shown before it.

    Args:
        stamps: of the chosen frames.
    """
    requested = set(stamps)
    if not len(packets.keyframes):
        return [(0, frozenset(requested))]
    segments: list[tuple[int, set[int]]] = []
    end = 0
    for position in np.flatnonzero(np.isin(packets.stored, list(requested))).tolist():
        stamp = int(packets.stored[position])
        index = bisect_right(packets.keyframes, position) - 1
        while index >= 0 and packets.stored[packets.keyframes[index]] > stamp:
            index -= 1
        start = int(packets.keyframes[index]) if index >= 0 else 0
        # Short gaps are decoded.
        if not segments or start - end >= FEWEST_SKIPPED:
            segments.append((start, set()))
        segments[-1][1].add(stamp)
        end = position + 1
    return [(start, frozenset(inside)) for start, inside in segments]


class LostFrameError(Exception):
    """A frame that the decoder does not give, or not whole, when it begins at a keyframe."""


def decoded(
    container: InputContainer, stream: VideoStream, packets: VideoPackets, stamps: Sequence[int], *, all_packets: bool
) -> Iterator[tuple[int, VideoFrame]]:
    """Yield the chosen frames with their stamps, as they are decoded: once each, and never two at a time.

    Args:
        stamps: of the chosen frames, as `VideoPackets.names` returns them.
        all_packets: decode all packets up to the last chosen frame.

    Raises:
        LostFrameError: not `all_packets`, and a frame cannot be decoded from a keyframe on.
    """
    segments = [(0, frozenset(stamps))] if all_packets else segments_of(packets, stamps)
    following = iter(segments)
    start, inside = next(following)
    missing, index, position, begun_at = set(stamps), 0, 0, start
    for packet in container.demux(stream):
        if packet.size:
            position += 1
            if position <= begun_at:
                continue
        # An empty packet ends the file: the decoder gives what it holds.
        for frame in packet.decode():
            stamp = frame.pts if packets.has_stamps else index
            index += 1
            if stamp is None or stamp not in missing:
                continue
            if begun_at and frame.is_corrupt:
                raise LostFrameError
            missing.remove(stamp)
            yield stamp, frame
        # The next segment. The decoder forgets what it holds, unless it has read beyond the beginning.
        while missing.isdisjoint(inside):
            segment = next(following, None)
            if segment is None:
                return
            start, inside = segment
            if position <= start:
                stream.codec_context.flush_buffers()
                begun_at = start
    if segments[-1][0]:
        raise LostFrameError
