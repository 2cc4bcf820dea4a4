"""Videos on their way into shards: lists of images, and video files that become frames."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import av
import numpy as np
import pytest
from PIL import Image

from llava_mcore.cli import prepare as command
from llava_mcore.config.sections.data import LIMITS, Limits
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.conversation import TextDecoder, cook_chat
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.samples import ChatSample
from llava_mcore.errors import DataError
from llava_mcore.prepare.media.video_files import NO_PYAV, decode_video, select_frames
from llava_mcore.prepare.media.videos import read_video
from llava_mcore.prepare.row_types import BadSample, Reason
from llava_mcore.prepare.sampling import Sampling
from llava_mcore.prepare.shard_plan import Counting, Options
from tests.helpers.prepare_cases import make, shard_bytes
from tests.helpers.tiny_hf import make_hf_llava, make_onevision
from tests.helpers.videos import greys, noise, turned, video_file

Q, A = {"role": "user", "content": "<video>\nWhy?"}, {"role": "assistant", "content": "So."}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_onevision(tmp_path_factory.mktemp("onevision"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a video of two seconds, frames and images."""
    video_file(tmp_path / "clip.mp4")
    for number in range(4):
        (tmp_path / f"f{number}.png").write_bytes(noise(20, 30, number))
    (tmp_path / "small.png").write_bytes(noise(10, 30))
    (tmp_path / "broken.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes()[:1500])
    (tmp_path / "text.mp4").write_text("no video")
    return tmp_path


def rows(place: Path, *found: Any) -> Path:
    """Write rows as JSON lines."""
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return place / "rows.jsonl"


def samples(folder: Path) -> dict[str, ChatSample]:
    """Read shards back as training does, by the ids of their rows."""
    parts: dict[str, dict[str, Any]] = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                parts.setdefault(key, {})[part] = file.read()
    found = {}
    for key, own in parts.items():
        sample = TextDecoder()({"__key__": key, "__restore_key__": (), **own})
        about = sample["json"]
        found[about.get("source", {}).get("id") or key] = cook_chat(sample)
    return found


def skipped(folder: Path) -> dict[str, tuple[str, str]]:
    lines = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    return {line["id"]: (line["reason"], line["detail"]) for line in lines}


# -- rows ----------------------------------------------------------------------------------------------------------

FRAMES = ["f0.png", "f1.png"]
GOOD: dict[str, tuple[dict[str, Any], list[int], float | None]] = {
    "list": ({"messages": [Q, A], "videos": [FRAMES]}, [2], None),
    "object": ({"messages": [Q, A], "videos": [{"frames": FRAMES, "fps": 3}]}, [2], 3.0),
    "file": ({"messages": [Q, A], "videos": ["clip.mp4"]}, [4], 2.0),
    "one file": ({"messages": [Q, A], "video": "clip.mp4"}, [4], 2.0),
    "struct": ({"messages": [Q, A], "videos": [{"path": "clip.mp4", "bytes": None}]}, [4], 2.0),
    "unmarked": ({"question": "Why?", "answer": "So.", "videos": [FRAMES]}, [2], None),
    "llava-video": (
        {"conversations": [{"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "So."}]}
        | {"video": "clip.mp4"},
        [4],
        2.0,
    ),
    "typed": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "video", "video": FRAMES, "fps": 5}, {"type": "text", "text": "Why?"}],
                },
                A,
            ]
        },
        [2],
        5.0,
    ),
    "url": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "clip.mp4"}}]},
                A,
            ]
        },
        [4],
        2.0,
    ),
    "two": ({"messages": [Q | {"content": "<video><video>"}, A], "videos": [FRAMES, "clip.mp4"]}, [2, 4], None),
}  # fmt: skip


def test_rows_with_videos(place: Path) -> None:
    """Every way to name a video gives its frames and their rate."""
    source = rows(place, *({"id": name, **row} for name, (row, _, _) in GOOD.items()))
    result = make(source, place / "out")
    assert not result.counts.skipped, result.first_skipped
    assert (result.counts.videos, result.counts.frames) == (11, 34)
    found = samples(place / "out")
    assert found.keys() == GOOD.keys()
    for name, (_, lengths, fps) in GOOD.items():
        (talk,) = found[name].conversations
        assert [len(clip.frames) for clip in talk.videos] == lengths, name
        assert talk.videos[0].fps == fps and talk.turns[0].text.startswith("<video>") and not talk.images, name
    assert found["list"].conversations[0].videos[0].frames == tuple((place / name).read_bytes() for name in FRAMES), (
        "the bytes of listed frames never change"
    )


BAD: dict[str, tuple[dict[str, Any], Reason, str]] = {
    "missing": ({"videos": ["gone.mp4"]}, Reason.VIDEO_MISSING, "No such file"),
    "folder": ({"videos": ["."]}, Reason.VIDEO_MISSING, "a folder"),
    "name": ({"videos": ["a\0b"]}, Reason.VIDEO_MISSING, "null"),
    "net": ({"videos": ["https://example.org/a.mp4"]}, Reason.VIDEO_REMOTE, "download it first"),
    "cut": ({"videos": ["broken.mp4"]}, Reason.VIDEO_BROKEN, "Error"),
    "text": ({"videos": ["text.mp4"]}, Reason.VIDEO_BROKEN, "Invalid data"),
    "picture": (
        {"videos": ["f0.png"]},
        Reason.WRONG_TYPE,
        r"a video is the image f0.png; frames of one video are .*\[\[",
    ),
    "number": ({"videos": [3]}, Reason.WRONG_TYPE, "a video is int 3"),
    "none": ({"videos": [[]]}, Reason.NO_FRAMES, ""),
    "sizes": ({"videos": [["f0.png", "small.png"]]}, Reason.FRAME_SIZES, "frames 0 and 1 .* 30 x 20 and 30 x 10"),
    "frame": ({"videos": [["f0.png", "gone.png"]]}, Reason.IMAGE_MISSING, "gone.png"),
    "fps": ({"videos": [{"frames": FRAMES, "fps": -1}]}, Reason.KEY, "fps must be a number above 0"),
    "frames": ({"videos": [{"frames": "f0.png"}]}, Reason.WRONG_TYPE, "the frames of a video are 'f0.png'"),
    "marks": (
        {"videos": [FRAMES, FRAMES]},
        Reason.MARKS,
        r"1 <video> in the text, but 2 videos; frames of one video are .*\[\[",
    ),
    "no video": ({}, Reason.MARKS, "1 <video> in the text, but 0 videos"),
    "many": ({"videos": [["f0.png"] * 11]}, Reason.TOO_LARGE, "11 frames; the limit is 10"),
}


def test_broken_rows(place: Path) -> None:
    """A row whose video cannot be used is left out with its reason."""
    source = rows(place, *({"id": name, "messages": [Q, A], **row} for name, (row, _, _) in BAD.items()))
    make(source, place / "out", Options(limits=Limits(frames=10)), max_skip_rate=1)
    found = skipped(place / "out")
    assert found.keys() == BAD.keys()
    for name, (_, reason, detail) in BAD.items():
        assert found[name][0] == reason.value and re.search(detail, found[name][1]), (name, found[name])


def test_tokens_are_those_of_training(place: Path, hf: Path) -> None:
    """Counted and stored, in packs as well; and prepared shards can be prepared again."""
    row = {
        "messages": [{"role": "user", "content": "<video> <image>"}, A],
        "images": ["f2.png"],
        "videos": ["clip.mp4"],
    }
    source = rows(place, *({"id": str(i), **row} for i in range(3)))
    make(source, place / "out", Options(counting=Counting(hf)))
    assets = load_assets(hf)
    for talk in samples(place / "out").values():
        (conversation,) = talk.conversations
        assert conversation.tokens is not None and len(conversation.images) == 1
        again = tokenize(conversation, assets, "k")
        assert conversation.tokens["by"] == assets.chat.fingerprint and len(again.media) == 2
    totals = json.loads((place / "out" / "manifest.json").read_text())["totals"]
    assert totals["tokens"]["total"] == 3 * len(again)
    make(place / "out" / "000000.tar", place / "again", Options(counting=Counting(hf)))
    first, second = (list(samples(place / name).values()) for name in ("out", "again"))
    assert [x.conversations for x in first] == [x.conversations for x in second]
    make(source, place / "packs", Options(counting=Counting(hf), pack_to=2 * len(again)))
    packs = [talk.conversations for talk in samples(place / "packs").values()]
    assert sorted(map(len, packs)) == [1, 2]
    assert all(c == first[0].conversations[0] for pack in packs for c in pack)


def test_a_model_without_videos(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rows with videos are left out, and the message names classes that take them."""
    folder = tmp_path_factory.mktemp("llava")
    make_hf_llava(folder)
    make(rows(place, {"id": "a", "messages": [Q, A], "videos": ["gone.mp4"]}), place / "out",
         Options(counting=Counting(folder)), max_skip_rate=1)  # fmt: skip
    reason, detail = skipped(place / "out")["a"]
    assert reason == Reason.NO_VIDEOS.value and "classes that do: LlavaOnevision" in detail


def test_the_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags reach the frames, and the same command writes the same bytes with any number of processes."""
    source = rows(place, *({"id": str(i), "messages": [Q, A], "clips": ["clip.mp4"]} for i in range(4)))
    flags = ["--video-key", "clips", "--video-fps", "5", "--video-max-frames", "7", "--samples-per-shard", "2"]
    for workers in (0, 2):
        out = ["--out", str(place / f"out{workers}"), "--num-workers", str(workers)]
        assert command.main([str(source), *out, *flags]) == 0
    assert shard_bytes(place / "out0") == shard_bytes(place / "out2")
    assert "4 (28 frames)" in capsys.readouterr().out
    assert all(len(c.conversations[0].videos[0].frames) == 7 for c in samples(place / "out0").values())


# -- video files ---------------------------------------------------------------------------------------------------


def decoded(path: Path, sampling: Sampling | None = None, limits: Limits = LIMITS) -> tuple[list[bytes], float]:
    with path.open("rb") as file:
        return decode_video(file, sampling or Sampling(), limits)[:2]


@pytest.mark.parametrize(
    ("fps", "max_frames", "expected", "rate"),
    [
        (2.0, 128, [0, 12, 25, 37], 2.0),
        (25.0, 128, list(range(50)), 25.0),
        (100.0, 128, list(range(50)), 25.0),
        (2.0, 2, [0, 25], 1.0),
        (0.1, 128, [0, 25], 1.0),
        (0.1, 1, [0], 0.1),
        (5.0, 7, [0, 7, 14, 21, 28, 35, 42], 3.5),
    ],
)
def test_which_frames_are_kept(tmp_path: Path, fps: float, max_frames: int, expected: list[int], rate: float) -> None:
    """Those that a player shows at evenly spaced times; their order is that of time, not of the file."""
    frames, found = decoded(video_file(tmp_path / "a.mp4"), Sampling(fps, max_frames))
    assert greys(frames) == expected and found == pytest.approx(rate)


CLIP_OPTIONS: list[tuple[dict[str, Any], list[int], float]] = [
    ({"fps": 5}, list(range(0, 50, 5)), 5.0),
    ({"nframes": 4}, [0, 12, 25, 37], 2.0),
    ({"num_frames": 3}, [0, 16, 33], 1.5),
    ({"fps": 0.5, "min_frames": 3}, [0, 16, 33], 1.5),
    ({"fps": 25, "max_frames": 5}, [0, 10, 20, 30, 40], 2.5),
    ({"video_start": 1, "video_end": 1.5}, [25, 37], 2.0),
    ({"video_start": 0.5}, [13, 25, 38], 2.0),
    ({"start_time": 1.0, "nframes": 2}, [25, 37], 2.0),
]


@pytest.mark.parametrize(("options", "expected", "rate"), CLIP_OPTIONS)
def test_options_of_one_video(tmp_path: Path, options: dict[str, Any], expected: list[int], rate: float) -> None:
    """A file of 50 frames, 25 per second, which by itself has [0, 12, 25, 37]."""
    video_file(tmp_path / "a.mp4")
    clip = read_video({"path": "a.mp4", **options}, tmp_path, Sampling(), LIMITS)
    assert greys([frame.data for frame in clip.frames]) == expected and clip.fps == pytest.approx(rate, abs=1e-3)


def test_the_rate_of_listed_frames(tmp_path: Path) -> None:
    """It is that of the row, else that of the flag."""
    (tmp_path / "a.png").write_bytes(noise(8, 9))
    for name in ("fps", "sample_fps"):
        assert read_video({"frames": ["a.png"] * 3, name: 0.5}, tmp_path, Sampling(), LIMITS).fps == 0.5
    assert read_video(["a.png"], tmp_path, Sampling(), LIMITS, frames_fps=4).fps == 4


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ({"path": "a.mp4", "nframes": 51}, "a video has 50 frames instead of 51 between second 0 and its end"),
        ({"path": "a.mp4", "nframes": 2.5}, "nframes is 2.5: not a whole number above 0"),
        ({"path": "a.mp4", "nframes": 4, "fps": 1}, "nframes is 4: fps, min_frames and max_frames cannot be given"),
        ({"path": "a.mp4", "fps": "1"}, "fps must be a number above 0"),
        ({"path": "a.mp4", "fps": 1, "sample_fps": 2}, r"fps and sample_fps is \[1, 2\]: they differ"),
        ({"path": "a.mp4", "min_frames": 9, "max_frames": 3}, "min_frames is 9: max_frames is 3"),
        ({"path": "a.mp4", "video_start": 3}, "a video has none between second 3.0 and its end"),
        ({"path": "a.mp4", "video_end": -1}, "video_end is -1: not a number of seconds"),
        ({"path": "a.mp4", "max_pixels": 99}, "max_pixels is 99: frames of one video cannot be resized"),
        ({"frames": ["a.png"], "nframes": 1}, "a list of frames has options of a video file"),
    ],
)
def test_options_that_cannot_be_honored(tmp_path: Path, reference: dict[str, Any], problem: str) -> None:
    video_file(tmp_path / "a.mp4")
    with pytest.raises(BadSample, match=problem):
        read_video(reference, tmp_path, Sampling(), LIMITS)


OTHERS = [("mkv", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mpg", "mpeg2video")]


@pytest.mark.parametrize(("suffix", "codec"), OTHERS)
def test_other_containers(tmp_path: Path, suffix: str, codec: str) -> None:
    """Frames are chosen alike in every container."""
    frames, _ = decoded(video_file(tmp_path / f"a.{suffix}", codec=codec, num_frames=30))
    assert greys(frames) == [0, 12, 25]


def test_frames_are_turned_as_they_are_shown(tmp_path: Path) -> None:
    path = video_file(tmp_path / "a.mp4", num_frames=2)
    assert Image.open(io.BytesIO(decoded(path)[0][0])).size == (64, 48)
    assert Image.open(io.BytesIO(decoded(turned(path, -90))[0][0])).size == (48, 64)


def test_the_direction_of_a_turn(tmp_path: Path) -> None:
    """A frame that is white at its top: turned clockwise, the white is at the right."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        values = np.zeros((48, 64, 3), np.uint8)
        values[:24] = 255
        container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(stream.encode())
    shown = np.asarray(Image.open(io.BytesIO(decoded(turned(path, -90))[0][0])))
    assert shown[:, 36:].mean() > 240 and shown[:, :12].mean() < 15
    shown = np.asarray(Image.open(io.BytesIO(decoded(turned(path, 180))[0][0])))
    assert shown[36:].mean() > 240 and shown[:12].mean() < 15


def test_times_that_are_not_even() -> None:
    """A frame that is shown for long is taken as often as it is shown."""
    times = [Fraction(0), Fraction(1, 10), Fraction(3)]
    assert select_frames(times, Fraction(1), Sampling(1.0, 10)) == ([0, 1, 1], 0.75)
    assert select_frames([Fraction(5), Fraction(6)], Fraction(1), Sampling(0.5, 10)) == ([0, 1], 1.0)
    assert select_frames([Fraction(5)], Fraction(2), Sampling(0.5, 10)) == ([0], 0.5)


PLAYLISTS = {
    "concat": "ffconcat version 1.0\nfile other.mp4\n",
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nother.mp4\n#EXT-X-ENDLIST\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>other.mp4</BaseURL></MPD>',
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_opens_no_other_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    video_file(tmp_path / "other.mp4")
    (tmp_path / "list.mp4").write_text(PLAYLISTS[kind])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSample, match="Error"):
        decoded(Path("list.mp4"))


def test_limits_of_a_video_file(tmp_path: Path) -> None:
    """Frames or bytes beyond a limit are refused with the limit."""
    path = video_file(tmp_path / "a.mp4")
    with pytest.raises(BadSample, match="frames of 64 x 48 pixels; the limit is 3000"):
        decoded(path, limits=Limits(image_pixels=3000))
    with pytest.raises(BadSample, match="more than 1000 bytes"):
        decoded(path, limits=Limits(sample_bytes=1000))


def test_an_audio_file_is_no_video(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 44100
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(BadSample, match="it has no images"):
        decoded(tmp_path / "a.mp4")


def test_without_pyav(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends: every row would be skipped. Listed frames need none."""
    monkeypatch.setitem(sys.modules, "av", None)
    make(rows(place, {"messages": [Q, A], "videos": [FRAMES]}), place / "listed")
    with pytest.raises(DataError) as raised:
        make(rows(place, {"messages": [Q, A], "videos": ["clip.mp4"]}), place / "out")
    assert str(raised.value) == NO_PYAV
