"""Frames of segments of a video file are those of decoding all of it, whatever its keyframes are."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import av
import numpy as np
import pytest

from llava_mcore.cli import prepare as command
from llava_mcore.config.sections.data import LIMITS, Limits
from llava_mcore.prepare.media import video_files
from llava_mcore.prepare.media.item_options import ClipOptions
from llava_mcore.prepare.media.video_files import decode_video
from llava_mcore.prepare.media.video_packets import FrameTimes, VideoPackets, read_packets, segments_of
from llava_mcore.prepare.row_types import BadSample
from llava_mcore.prepare.sampling import Sampling
from tests.helpers.videos import moving_video

LENGTH = 240
X264 = {"preset": "veryfast", "g": "40", "keyint_min": "10"}


def uneven(count: int) -> list[int]:
    """Timestamps of frames that are shown for 1 to 7 steps."""
    draw = random.Random(0)
    stamps = [0]
    while len(stamps) < count:
        stamps.append(stamps[-1] + draw.randint(1, 7))
    return stamps


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "short groups": ("a.mp4", {"options": {**X264, "g": "5", "keyint_min": "5"}}),
    "B-frames": ("a.mp4", {"options": {**X264, "bf": "4"}}),
    "open groups": ("a.mp4", {"options": {**X264, "bf": "4", "x264-params": "open-gop=1:scenecut=0"}}),
    "no B-frames": ("a.mkv", {"options": {**X264, "bf": "0"}}),
    "one keyframe": ("a.mp4", {"options": {**X264, "g": "10000", "x264-params": "scenecut=0"}}),
    "no keyframes but the first, refreshed": ("a.ts", {"options": {**X264, "x264-params": "intra-refresh=1"}}),
    "uneven": ("a.mp4", {"options": {**X264, "bf": "2"}, "stamps": uneven(LENGTH)}),
    "hevc": ("a.mp4", {"codec": "libx265", "options": {"preset": "ultrafast", "x265-params": "keyint=30:log-level=0"}}),
    "vp9": ("a.webm", {"codec": "libvpx-vp9", "options": {"g": "30", "cpu-used": "8", "deadline": "realtime"}}),
    "mpeg2": ("a.mpg", {"codec": "mpeg2video", "options": {"g": "12", "bf": "2"}}),
    "avi": ("a.avi", {"codec": "mpeg4", "options": {"g": "25"}}),
    "gif": ("a.gif", {"codec": "gif"}),
}


def linear(path: Path) -> list[bytes]:
    """Every frame of a file, decoded one after the other."""
    with av.open(str(path)) as container:
        return [video_files._jpeg(frame, LIMITS) for frame in container.decode(video=0)]


def written(path: Path, codec: str = "libx264", **options: Any) -> Path:
    if codec != "gif":
        return moving_video(path, LENGTH, codec=codec, **options)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("gif", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "rgb8"
        for number in range(LENGTH):
            values = np.zeros((48, 64, 3), np.uint8)
            values[number % 48, number % 64] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24").reformat(format="rgb8")))
        container.mux(stream.encode())
    return path


def packets_of(path: Path) -> VideoPackets:
    with av.open(str(path)) as container:
        return read_packets(container, container.streams.video[0])


@pytest.mark.parametrize("name", FILES)
def test_frames_of_segments_are_those_of_the_whole_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, for few and many frames, from the beginning and from inside."""
    file, options = FILES[name]
    path = written(tmp_path / file, **options)
    expected, packets = linear(path), packets_of(path)
    assert len(expected) == len(packets.times) == LENGTH and packets.header_problem is None
    draw = random.Random(1)
    for count in (1, 2, 3, 7, 20, 60):
        chosen = sorted(draw.sample(range(LENGTH), count))
        monkeypatch.setattr(video_files, "_select", lambda *_, chosen=chosen: (chosen, 1.0))
        with path.open("rb") as opened:
            frames, *_ = decode_video(opened, Sampling(), LIMITS)
        assert frames == [expected[index] for index in chosen], (name, chosen)


def test_what_is_decoded(tmp_path: Path) -> None:
    """Segments without a chosen frame are read past; where there is one keyframe, nothing is."""
    packets = packets_of(moving_video(tmp_path / "a.mp4", LENGTH, options={**X264, "x264-params": "scenecut=0"}))
    stamps = packets.times.stamps
    assert [p for p in packets.keyframes] == list(range(0, LENGTH, 40))
    found = segments_of(packets, [int(stamps[index]) for index in (3, 130, 135, 239)])
    assert [start for start, _ in found] == [0, 120, 200]
    assert [len(inside) for _, inside in found] == [1, 2, 1]
    # A gap that is shorter than a decoder's delay is decoded.
    assert [start for start, _ in segments_of(packets, stamps[[38, 41, 44]].tolist())] == [0]
    assert [start for start, _ in segments_of(packets, stamps[[20, 41, 44]].tolist())] == [0, 40]
    whole = packets_of(moving_video(tmp_path / "b.mp4", LENGTH, options={**X264, "g": "9999", "keyint_min": "9999"}))
    assert [start for start, _ in segments_of(whole, whole.times.stamps[[3, 239]].tolist())] == [0]


def test_a_keyframe_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that calls every packet a keyframe: the decoder loses frames, and all of the file is decoded."""
    path = moving_video(tmp_path / "a.mp4", LENGTH, options=X264)
    expected = linear(path)
    passes = []

    def all_keyframes(container: Any, stream: Any) -> VideoPackets:
        found = read_packets(container, stream)
        starts = np.arange(len(found.stored))
        return VideoPackets(found.times, found.last_duration, True, found.stored, starts, 0)

    def counted(*args: Any, all_packets: bool) -> list[bytes]:
        passes.append(all_packets)
        return once(*args, all_packets=all_packets)

    once = video_files._decode
    monkeypatch.setattr(video_files, "read_packets", all_keyframes)
    monkeypatch.setattr(video_files, "_decode", counted)
    with path.open("rb") as opened:
        frames, *_ = decode_video(opened, Sampling(2.0), LIMITS, ClipOptions(start=3.0, num_frames=4))
    assert frames == [expected[index] for index in (75, 116, 157, 198)] and passes == [False, True]


def test_a_header_with_another_number_of_frames(tmp_path: Path) -> None:
    """An AVI's header is not believed: its frames are those of the file, and it is named."""
    path = moving_video(tmp_path / "a.avi", LENGTH, codec="mpeg4")
    data = bytearray(path.read_bytes())
    header = data.index(b"strh") + 8 + 32  # the stream's length in frames
    assert int.from_bytes(data[header : header + 4], "little") == LENGTH
    data[header : header + 4] = (1000).to_bytes(4, "little")
    path.write_bytes(data)
    assert packets_of(path).header_problem == "the header says 1000 frames, but the file has 240"
    with path.open("rb") as opened:
        frames, fps, problem = decode_video(opened, Sampling(2.0), LIMITS)
    whole = linear(path)
    assert fps == 2.0 and problem is not None and frames == [whole[int(12.5 * index)] for index in range(20)]


def test_the_summary_names_a_wrong_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = moving_video(tmp_path / "a.avi", 50, codec="mpeg4")
    data = bytearray(path.read_bytes())
    header = data.index(b"strh") + 40
    data[header : header + 4] = (51).to_bytes(4, "little")
    path.write_bytes(data)
    row = {"question": "<video>Why?", "answer": "So.", "video": "a.avi"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert command.main([str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), "--num-workers", "0"]) == 0
    assert (
        "1 sample with a video file whose header has a wrong number of frames, which was not used. One is rows.jsonl, "
        "row 0: the header says 51 frames, but the file has 50"
    ) in capsys.readouterr().out


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    """An MP4 with its table at the beginning, and only half of its frames."""
    path = moving_video(tmp_path / "a.mp4", LENGTH, options=X264)
    with av.open(str(path)) as source, av.open(str(tmp_path / "b.mp4"), "w", options={"movflags": "faststart"}) as copy:
        stream = copy.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = stream
                copy.mux(packet)
    data = (tmp_path / "b.mp4").read_bytes()
    path.write_bytes(data[: len(data) // 2])
    cut_off = r"the header says 240 frames, but the file has \d+: it was cut off"
    with path.open("rb") as opened, pytest.raises(BadSample, match=cut_off):
        decode_video(opened, Sampling(), LIMITS)


def test_too_many_frames_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = moving_video(tmp_path / "a.mp4", LENGTH, options=X264)
    monkeypatch.setattr(video_files, "_decode", lambda *_, **__: pytest.fail("it was decoded"))
    with path.open("rb") as opened, pytest.raises(BadSample, match=r"240 frames; the limit is 100 \(--max-frames\)"):
        decode_video(opened, Sampling(25.0, 1000), Limits(frames=100))


def test_times_are_computed_from_stamps() -> None:
    times = FrameTimes(np.array([0, 512, 1024]), Fraction(1, 12800))
    assert list(times) == [0, Fraction(1, 25), Fraction(2, 25)] and times[1:][0] == Fraction(1, 25) and len(times) == 3
