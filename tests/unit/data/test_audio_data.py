"""Audio files: decoded like transformers' own loading, and every kind of bad one is refused or left out."""

from __future__ import annotations

import io
import json
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from transformers import AutoProcessor

from llava_mcore.cli.check import main as check
from llava_mcore.cli.prepare import main as prepare
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.processors import audio_files
from llava_mcore.data.processors.audio_files import audio_format, audio_length, check_audio, decode_audio
from llava_mcore.data.samples import Turn
from llava_mcore.errors import ConfigError, DataError
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, MEDIA_SEQLENS, PIXEL_VALUES
from llava_mcore.prepare.row_types import Reason
from tests.helpers.bad_data_makers import Parts, index, messages, write_tar
from tests.helpers.tiny_audio import RATE, encoded, make_hf_audio, wave
from tests.helpers.tiny_hf import make_hf_llava
from tests.unit.data.test_data_loader import assert_equal, open_loader, take

ANSWER = ("assistant", "It is seven.")
KINDS = [("WAV", None), ("WAV", "FLOAT"), ("FLAC", None), ("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS")]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio") / "hf"
    make_hf_audio(folder)
    return folder


@pytest.fixture(scope="module")
def assets(hf: Path) -> Assets:
    return load_assets(hf)


@pytest.mark.parametrize(("kind", "subtype"), KINDS)
@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_formats_rates_and_channels(kind: str, subtype: str | None, rate: int, channels: int) -> None:
    """As librosa loads for transformers: the mean of the channels, resampled by soxr, its length rounded up."""
    data = encoded(1.2345, 3, kind=kind, rate=rate, channels=channels, subtype=subtype)
    samples, own_rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    expected = samples.mean(axis=1)
    if own_rate != RATE:
        expected = soxr.resample(expected, own_rate, RATE, quality="HQ")
    found = decode_audio(data, RATE)
    assert len(found) == audio_length(data, RATE) == -(-len(samples) * RATE // own_rate)
    assert found.dtype == np.float32 and np.array_equal(found, decode_audio(data, RATE))
    assert np.abs(found[: len(expected)] - expected[: len(found)]).max() <= (1e-6 if kind in ("MP3", "OGG") else 0)
    assert not found[len(expected) :].any() and abs(len(found) - len(expected)) <= 1
    extension, seconds = audio_format(data)
    assert extension == kind.lower() and seconds == len(samples) / own_rate
    assert np.corrcoef(found, wave(1.2345, 3))[0, 1] > 0.9


def test_eight_channels_and_odd_rates() -> None:
    """The length that is predicted is that of the decoded audio clip."""
    for rate in (11_025, 22_050, 44_100, 96_000):
        data = encoded(0.777, rate=rate, channels=8)
        assert len(decode_audio(data, RATE)) == audio_length(data, RATE)


def resized(data: bytes, size: int, form: str = "<I", chunk: bytes = b"data", place: int = 0) -> bytes:
    """A wav with another size in one of its chunks."""
    start = data.index(chunk) + (4 if chunk == b"data" else 8) + place
    return data[:start] + struct.pack(form, size) + data[start + struct.calcsize(form) :]


@pytest.mark.parametrize(
    "size", [0, 0x7FFFF000, 0x7FFFFFDB, 0x7FFFFFFF, 0x80000000, 0x80000024, 0xFFFFF000, 0xFFFFFFDB, 0xFFFFFFFF]
)
def test_wavs_of_unknown_length(size: int) -> None:
    """By programs that wrote to a pipe; nothing is reserved for what they claim."""
    expected, plain = decode_audio(encoded(0.5), RATE), encoded(0.5)
    streamed = {"RIFF": resized(plain, size), "RIFX": resized(encoded(0.5, endian="BIG"), size, ">I")}
    for claimed in (0, 0x7FFFF000, (1 << 64) - 1):
        streamed[f"RF64 {claimed}"] = resized(encoded(0.5, kind="RF64"), claimed, "<Q", b"ds64", 8)
    for name, data in streamed.items():
        assert np.array_equal(decode_audio(data, RATE), expected), name
        assert audio_length(data, RATE) == len(expected) and audio_format(data) == ("wav", 0.5), name
        check_audio(data)


def test_a_flac_of_unknown_length_is_refused() -> None:
    data = encoded(0.5, kind="FLAC")
    (total,) = struct.unpack_from(">Q", data, 18)
    for claimed, problem in ((0, "does not say how long it is: write it to a file again"), ((1 << 36) - 1, "decoded")):
        claiming = data[:18] + struct.pack(">Q", total >> 36 << 36 | claimed) + data[26:]
        tracemalloc.start()
        with pytest.raises(DataError, match=problem):
            check_audio(claiming)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26  # not what the header claims, 256 GB
        tracemalloc.stop()


def silence(hours: float, rate: int = 8_000) -> bytes:
    """A small file of a long audio clip."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", rate, 1, format="FLAC") as file:
        for _ in range(round(hours * 36)):
            file.write(np.zeros(100 * rate, np.int16))
    return buffer.getvalue()


def header(data: bytes, place: int, value: int, form: str = "<I") -> bytes:
    """A file with another number in its header."""
    size = struct.calcsize(form)
    return data[:place] + struct.pack(form, value) + data[place + size :]


def not_numbers() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.full(8_000, np.nan, np.float32), RATE, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


CHANNELS, FREQUENCY = 22, 24
"""Bytes of a wav's header."""
BAD: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "empty": (lambda: b"", "wav", r"an audio clip is empty \(0 bytes\)"),
    "text named .wav": (lambda: b"I said: no audio here.\n" * 9, "wav", "an audio clip of 207 bytes cannot be opened"),
    "web page named .mp3": (lambda: b"<html>404</html>", "mp3", "an audio clip of 16 bytes cannot be opened"),
    "image named .flac": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(99), "flac", "cannot be opened"),
    "another format": (lambda: encoded(0.5, kind="AIFF"), "wav", "has the format AIFF; supported: wav, flac, mp3, ogg"),
    "cut wav": (lambda: encoded(1.0)[:9000], "wav", "truncated: 32000 bytes of samples, of which 8956 exist"),
    "cut flac": (lambda: encoded(1.0, kind="FLAC")[:9000], "flac", "an audio clip cannot be decoded"),
    "cut mp3": (lambda: encoded(2.0, kind="MP3")[:4000], "mp3", "truncated: .* of 32000 samples could be decoded"),
    "cut ogg": (lambda: encoded(9.0, kind="OGG")[:40_000], "ogg", "truncated: its last page is missing"),
    "only a header": (lambda: encoded(1.0)[:44], "wav", "an audio clip is truncated: 32000 bytes"),
    "no samples": (lambda: encoded(0.0), "wav", "an audio clip has no samples"),
    "no samples, but a list": (lambda: encoded(0.0) + b"LIST\4\0\0\0INFO", "wav", "an audio clip has no samples"),
    "cut rf64": (lambda: encoded(1.0, kind="RF64")[:9000], "wav", "an audio clip is truncated: 32000 bytes of samples"),
    "too short": (lambda: encoded(0.01), "wav", "too short for a token"),
    "a minute": (lambda: encoded(60.0), "wav", "60.0 seconds long, but the model takes at most 30"),
    "three hours": (lambda: silence(3), "flac", "10800.0 seconds long, but the model takes at most 30"),
    "impossible channels": (lambda: header(encoded(1.0), CHANNELS, 999, "<H"), "wav", "cannot be opened|999 channels"),
    "impossible rate": (lambda: header(encoded(1.0), FREQUENCY, 4_000_000_000), "wav", "cannot be opened|per second"),
    "wrong rate": (lambda: header(encoded(1.0), FREQUENCY, 100), "wav", "160.0 seconds long"),
    "no numbers": (not_numbers, "wav", "an audio clip has samples that are not finite"),
}
"""How each is made, the suffix of its part, and why it is left out."""


@pytest.fixture(scope="module")
def bad_audio() -> dict[str, bytes]:
    return {name: make() for name, (make, _, _) in BAD.items()}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_audio_clip_is_left_out_with_its_reason(
    name: str, bad_audio: dict[str, bytes], assets: Assets, hf: Path, tmp_path: Path
) -> None:
    """In training, by `check`, and by prepare."""
    talk, (_, part, reason) = messages(("user", "<audio>\nWhat?"), ANSWER), BAD[name]
    good: Parts = {"json": talk, "0.wav": encoded(0.5)}
    bad: Parts = {"json": talk, f"0.{part}": bad_audio[name]}
    write_tar(tmp_path / "data" / "000000.tar", {f"{i:06d}": bad if i == 2 else good for i in range(4)})
    options: dict[str, Any] = {"num_streams": 1, "micro_batch_size": 1, "shuffle": 0, "seq_length": 256}
    batches = take(open_loader(index(tmp_path / "data"), assets, **options), 6)
    found = {skip.reason for batch in batches for skip in batch.skipped}
    assert len(found) == 1 and _says(reason, *found), found
    flags = ["--data-path", str(tmp_path / "data"), "--tokenizer-load-dir", str(hf), "--full", "--num-workers", "0"]
    report = tmp_path / "report.json"
    assert check([*flags, "--max-skip-rate", "0.3", "--json", str(report)]) == 0
    (group,) = json.loads(report.read_text())["groups"]
    assert group["level"] == "left out" and _says(reason, group["reason"])
    # prepare reads headers, and all of a file with --check-images.
    (tmp_path / f"bad.{part}").write_bytes(bad_audio[name])
    (tmp_path / "good.wav").write_bytes(encoded(0.5))
    rows = [talk | {"audio": clip} for clip in ("good.wav", f"bad.{part}", "good.wav")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    out = ["--out", str(tmp_path / "out"), "--tokenizer-load-dir", str(hf), "--num-workers", "0", "--check-images"]
    assert prepare([str(tmp_path / "rows.json"), *out]) == 2
    assert prepare([str(tmp_path / "rows.json"), *out, "--max-skip-rate", "0.4"]) == 0
    (line,) = map(json.loads, (tmp_path / "out" / "skipped.jsonl").read_text().splitlines())
    assert line["reason"] in (Reason.AUDIO_BROKEN.value, Reason.AUDIO_LENGTH.value) and _says(reason, line["detail"])


def _says(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def test_a_long_audio_clip_is_refused_by_its_header(
    bad_audio: dict[str, bytes], assets: Assets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(audio_files, "_blocks", decode)
    with pytest.raises(DataError, match="takes at most 30"):
        assets.plan.audio_tokens([audio_length(bad_audio["three hours"], RATE)])


# -- the loader ------------------------------------------------------------------------------------------------------


def spoken(*seconds: float, question: str | None = None) -> Parts:
    """A sample about clips."""
    asked = question or "<audio>\n" * len(seconds) + "What?"
    sounds = {f"{i}.{'wav' if i % 2 else 'flac'}": x for i, x in enumerate(seconds)}
    return {"json": messages(("user", asked), ANSWER)} | {
        name: encoded(x, 7, kind="WAV" if name.endswith("wav") else "FLAC") for name, x in sounds.items()
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One clip, two in a conversation, and text alone."""
    folder = tmp_path_factory.mktemp("talks")
    text: Parts = {"json": messages(("user", "Why?"), ANSWER)}
    kinds = [spoken(0.5), spoken(1.0, 0.31, question="<audio> and <audio>?"), text, spoken(2.0)]
    write_tar(folder / "000000.tar", {f"{i:03d}": kinds[i % 4] for i in range(16)})
    return index(folder)


@pytest.mark.parametrize(("workers", "packing"), [(0, False), (1, True)])
def test_batches_hold_the_frames_of_all_clips(dataset: Path, assets: Assets, workers: int, packing: bool) -> None:
    loader = open_loader(dataset, assets, workers=workers, packing=packing, seq_length=256)
    batches = take(loader, 8)
    loader.close()
    hidden = {0: [25], 1: [50, 16], 2: [], 3: [100]}
    for batch in batches:
        assert not batch.skipped
        expected = [n for key in batch.sample_keys for n in hidden[int(key) % 4]]
        assert batch.media[MEDIA_SEQLENS].tolist() == expected
        assert batch.media[PIXEL_VALUES].shape == (sum(2 * n + 2 for n in expected), 16)
        places = (batch.input_ids.flatten() == assets.plan.audio_token_id).nonzero()[:, 0]
        assert torch.equal(places, batch.media[FEATURE_POSITIONS]) and len(places) == sum(n // 2 for n in expected)
        assert not (batch.labels == assets.plan.audio_token_id)[batch.loss_mask.bool()].any()


def test_a_saved_position_continues_the_same_batches(dataset: Path, assets: Assets) -> None:
    options: dict[str, Any] = {"packing": True, "seq_length": 256}
    loader = open_loader(dataset, assets, **options)
    take(loader, 3)
    state, expected = loader.state(), take(loader, 4)
    again = open_loader(dataset, assets, **options, saved=[state])
    assert_equal(take(again, 4), expected)


def test_a_pack_keeps_to_the_budget_of_frames(dataset: Path, assets: Assets) -> None:
    options: dict[str, Any] = {"packing": True, "seq_length": 1024, "micro_batch_size": 1, "num_streams": 1}
    free = take(open_loader(dataset, assets, **options), 4)
    assert max(int(batch.media[MEDIA_SEQLENS].sum()) for batch in free) > 130
    bound = take(open_loader(dataset, assets, max_media_tokens=130, **options), 8)
    assert max(int(batch.media[MEDIA_SEQLENS].sum()) for batch in bound) <= 130
    tight = take(open_loader(dataset, assets, max_media_tokens=90, **options), 6)
    assert {skip.reason for batch in tight for skip in batch.skipped} == {
        "the sample has 100 20 ms frames of audio, but data.max_media_tokens is 90; raise data.max_media_tokens, or "
        "choose --on-too-long truncate"
    }
    with pytest.raises(ConfigError, match="the smallest audio clip has 2 20 ms frames of audio"):
        open_loader(dataset, assets, max_media_tokens=1)


def test_audio_in_a_store_and_listed_parts(assets: Assets, tmp_path: Path) -> None:
    """Audio clips are found in the sample and beside the shards; a missing one has a reason."""
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs" / "a.mp3").write_bytes(encoded(1.0, kind="MP3"))
    talk = messages(("user", "<audio>\nWhat? <audio>"), ANSWER)
    sound = encoded(0.5)
    parts: dict[str, Parts] = {
        "000": {"json": talk | {"audios": ["b.wav", "a.mp3"]}, "b.wav": sound},
        "001": {"json": talk | {"audios": ["b.wav", "gone.mp3"]}, "b.wav": sound},
        "002": {"json": talk | {"audios": ["b.wav"]}, "b.wav": sound, "c.wav": sound},
        "003": {"json": talk | {"audios": "b.wav"}, "b.wav": sound},
        "004": {"json": talk, "b.wav": sound, "c.wav": sound},
        "005": {"json": talk, "1.wav": sound},
    }
    write_tar(tmp_path / "data" / "000000.tar", parts)
    index(tmp_path / "data")
    entry = "{weight: 1, path: data, aux: {images: 'filesystem://wavs'}}"
    start = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    (tmp_path / "blend.yaml").write_text(f"{start}      - {entry}\n")
    batches = take(open_loader(tmp_path / "blend.yaml", assets, num_streams=1, micro_batch_size=1, seq_length=256), 3)
    assert all(batch.media[MEDIA_SEQLENS].tolist() == [25, 50] for batch in batches)
    assert {skip.reason for batch in batches for skip in batch.skipped} == {
        f"the image 'gone.mp3' is not in {tmp_path / 'wavs'}",
        "\"audios\" does not list the part 'c.wav'",
        "\"audios\" must be a list of names, found 'b.wav'",
        "several audio clips must be numbered (0.wav, 1.mp3, …), found the parts ['b.wav', 'c.wav']",
        "2 <audio> in the conversation, but 1 audio clips",
    }


def test_samples_of_another_kind_are_left_out(dataset: Path, assets: Assets, tmp_path: Path) -> None:
    """Audio for a class that takes images, and images for one that takes audio."""
    make_hf_llava(tmp_path / "llava")
    batches = take(open_loader(dataset, load_assets(tmp_path / "llava"), micro_batch_size=1), 4)
    reasons = {skip.reason for batch in batches for skip in batch.skipped}
    assert reasons == {
        "it has an audio clip, but LlavaForConditionalGeneration does not support audio; classes that do: "
        "Qwen2AudioForConditionalGeneration"
    }
    picture: Parts = {"json": messages(("user", "<image>\nWhat?"), ANSWER), "0.jpg": b"x"}
    write_tar(tmp_path / "data" / "000000.tar", {f"{i}": picture if i % 2 else spoken(0.5) for i in range(6)})
    found = take(open_loader(index(tmp_path / "data"), assets, micro_batch_size=1), 4)
    assert {skip.reason for batch in found for skip in batch.skipped} == {
        "it has an image, but Qwen2AudioForConditionalGeneration does not support images, only audio"
    }


def test_check_counts_audio_clips(dataset: Path, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data-path", str(dataset), "--tokenizer-load-dir", str(hf), "--full", "--num-workers", "0"]
    assert check([*flags, "--json", str(tmp_path / "report.json"), "--show", "2"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["audios_per_sample"] == {"0": 4, "1": 8, "2": 4} and report["epoch"]["audios"] == 16
    printed = capsys.readouterr().out
    assert "audio clips per sample: 0: 4, 1: 8, 2: 4" in printed and "images per sample" not in printed
    assert "16 audio clips" in printed and "<audio \N{MULTIPLICATION SIGN}12>" in printed


# -- prepare ---------------------------------------------------------------------------------------------------------

ASKED, SAID = {"role": "user", "content": "<audio>\nWhat?"}, {"role": "assistant", "content": "It is seven."}
TYPED = [{"type": "audio", "audio_url": "a.wav"}, {"type": "text", "text": "And"}, {"type": "audio"}]
GOOD: dict[str, tuple[dict[str, Any], int]] = {
    "list": ({"messages": [ASKED, SAID], "audios": ["a.wav"]}, 1),
    "one": ({"messages": [ASKED, SAID], "audio": "b.mp3"}, 1),
    "struct": ({"messages": [ASKED, SAID], "audio": {"path": "b.mp3", "bytes": None}}, 1),
    "unmarked": ({"question": "What?", "answer": "It is seven.", "audio": "c.ogg"}, 1),
    "llava": (
        {"conversations": [{"from": "human", "value": "<audio>\nWhat?"}, {"from": "gpt", "value": "7"}]}
        | {"audio": "d.flac"},
        1,
    ),
    "typed": ({"messages": [{"role": "user", "content": TYPED}, SAID], "audios": ["d.flac"]}, 2),
}
REFUSED: dict[str, tuple[dict[str, Any], Reason]] = {
    "missing": ({"messages": [ASKED, SAID], "audio": "gone.wav"}, Reason.AUDIO_MISSING),
    "remote": ({"messages": [ASKED, SAID], "audio": "https://x.org/a.wav"}, Reason.AUDIO_REMOTE),
    "number": ({"messages": [ASKED, SAID], "audio": 3}, Reason.WRONG_TYPE),
    "more marks": ({"messages": [ASKED, SAID]}, Reason.MARKS),
    "text": ({"messages": [ASKED, SAID], "audio": "rows.jsonl"}, Reason.AUDIO_BROKEN),
    "picture": ({"question": "What?", "answer": "7", "image": "a.wav"}, Reason.NO_IMAGES),
}


def test_prepared_rows_are_what_training_reads(
    hf: Path, assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, kind in (("a.wav", "WAV"), ("b.mp3", "MP3"), ("c.ogg", "OGG"), ("d.flac", "FLAC")):
        (tmp_path / name).write_bytes(encoded(1.0, kind=kind))
    rows = [{"id": name} | row for name, (row, _) in (*GOOD.items(), *REFUSED.items())]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--out", str(tmp_path / "out"), "--tokenizer-load-dir", str(hf), "--num-workers", "0"]
    assert prepare([str(tmp_path / "rows.jsonl"), *flags, "--max-skip-rate", "0.6", "--keep-order"]) == 0
    lines = map(json.loads, (tmp_path / "out" / "skipped.jsonl").read_text().splitlines())
    assert {line["id"]: line["reason"] for line in lines} == {name: r.value for name, (_, r) in REFUSED.items()}
    assert f"{len(GOOD) + 1} (0.00 h)" in capsys.readouterr().out
    options: dict[str, Any] = {"num_streams": 1, "micro_batch_size": 1, "shuffle": 0, "seq_length": 256}
    batches = take(open_loader(tmp_path / "out", assets, **options), len(GOOD))
    numbers = {int(batch.sample_keys[0]): len(batch.media[MEDIA_SEQLENS]) for batch in batches}
    assert numbers == {row: number for row, (_, number) in enumerate(GOOD.values())}
    assert all(not batch.skipped and set(batch.media[MEDIA_SEQLENS].tolist()) == {50} for batch in batches)
    # Shards of its own are prepared again, with audio clips as they are.
    assert (
        prepare([str(tmp_path / "out" / "000000.tar"), "--out", str(tmp_path / "twice"), *flags[-2:], "--keep-order"])
        == 0
    )
    again = take(open_loader(tmp_path / "twice", assets, **options), len(GOOD))
    for one, other in zip(batches, again, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.media[PIXEL_VALUES], other.media[PIXEL_VALUES])


def test_a_column_of_audio_clips(hf: Path, assets: Assets, tmp_path: Path) -> None:
    """As the `datasets` library writes speech: structs of bytes and path, with a transcript."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"audio": {"bytes": encoded(0.5, i), "path": f"{i}.wav"}, "text": "seven"} for i in range(3)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "speech.parquet")
    flags = ["--out", str(tmp_path / "out"), "--num-workers", "0", "--answer-key", "text", "--captions"]
    assert prepare([str(tmp_path / "speech.parquet"), *flags, "--tokenizer-load-dir", str(hf)]) == 0
    (batch,) = take(open_loader(tmp_path / "out", assets, num_streams=1, micro_batch_size=1), 1)
    assert batch.media[MEDIA_SEQLENS].tolist() == [25]


def test_packs_are_written_by_true_numbers_of_tokens(hf: Path, assets: Assets, tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(hf)
    (tmp_path / "a.wav").write_bytes(encoded(3.0))
    rows = [{"messages": [ASKED, SAID], "audio": "a.wav"}] * 6
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    flags = ["--out", str(tmp_path / "out"), "--tokenizer-load-dir", str(hf), "--num-workers", "0", "--pack-to", "256"]
    assert prepare([str(tmp_path / "rows.json"), *flags]) == 0
    loader = open_loader(tmp_path / "out", assets, num_streams=1, micro_batch_size=1, packing=True, seq_length=256)
    batch = next(loader)
    text = assets.chat.render([Turn("user", "<audio>\nWhat?"), Turn("assistant", "It is seven.")])
    made = processor(text=text, audio=[wave(3.0)], sampling_rate=RATE, add_special_tokens=False)
    assert len(batch.sample_keys) == 256 // len(made["input_ids"][0])
    assert batch.num_tokens == len(batch.sample_keys) * len(made["input_ids"][0])
