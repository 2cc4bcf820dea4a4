"""Videos from shards, jsonl and a store of images through the loader, its budgets, and the counts of `check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon.cli.main import main as energon

from llava_mcore.cli.check import main as check
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.samples import MediaSpan
from llava_mcore.media.batch_fields import PIXEL_VALUES
from llava_mcore.media.media import VideoShape
from tests.helpers.bad_data_makers import Parts, index, messages, write_tar
from tests.helpers.tiny_hf import make_onevision
from tests.helpers.videos import noise, video
from tests.unit.data.test_data_loader import open_loader, take

ANSWER = ("assistant", "It moves.")
PATCHES = 16
"""Of a tile."""
POSITIONS = ("feature_positions", "newline_positions", "resized_positions")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_onevision(tmp_path_factory.mktemp("onevision"))


@pytest.fixture(scope="module")
def assets(hf: Path) -> Assets:
    return load_assets(hf)


def film(num_frames: int, *, pictures: int = 0) -> Parts:
    """A sample about a video, with images beside it."""
    frames = {f"v.{i}.png": noise(20, 30, i) for i in range(num_frames)}
    talk = messages(("user", "<image>" * pictures + "<video>What happens?"), ANSWER)
    about = talk | {"videos": [{"frames": list(frames), "fps": 2.0}]}
    return {"json": about, **{f"{i}.png": noise(30, 20, i) for i in range(pictures)}, **frames}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of 2, 4 and 6 frames, with no image or two, and text."""
    folder = tmp_path_factory.mktemp("films")
    text: Parts = {"json": messages(("user", "Why?"), ANSWER)}
    kinds = [film(2), film(4, pictures=2), film(6), text]
    write_tar(folder / "000000.tar", {f"{i:03d}": kinds[i % 4] for i in range(16)})
    return index(folder)


@pytest.mark.parametrize(("workers", "packing"), [(0, False), (1, True)])
def test_batches_hold_the_tiles_of_all_media(dataset: Path, assets: Assets, workers: int, packing: bool) -> None:
    loader = open_loader(dataset, assets, workers=workers, packing=packing, seq_length=256)
    batches = take(loader, 8)
    loader.close()
    expected = {0: 2, 1: 4 + 2, 2: 6, 3: 0}
    for batch in batches:
        assert not batch.skipped
        assert len(batch.media[PIXEL_VALUES]) == sum(expected[int(key) % 4] for key in batch.sample_keys)
        placeholders = torch.isin(batch.input_ids, torch.tensor(assets.plan.placeholders))
        assert not (placeholders & torch.roll(batch.loss_mask.bool(), 1, 1)).any()
        assert placeholders.sum() == sum(len(batch.media[name]) for name in POSITIONS)


def test_a_pack_keeps_to_the_budget_of_patches(dataset: Path, assets: Assets) -> None:
    """Frames count as tiles do; a video that has more by itself is left out."""
    options: dict[str, Any] = {"packing": True, "seq_length": 512, "micro_batch_size": 1, "num_streams": 1}
    free = take(open_loader(dataset, assets, **options), 6)
    assert max(len(batch.media[PIXEL_VALUES]) for batch in free) > 6
    bound = take(open_loader(dataset, assets, max_media_tokens=6 * PATCHES, **options), 12)
    assert max(len(batch.media[PIXEL_VALUES]) for batch in bound) == 6 and not any(batch.skipped for batch in bound)
    tight = take(open_loader(dataset, assets, max_media_tokens=5 * PATCHES, **options), 6)
    reasons = {skip.reason for batch in tight for skip in batch.skipped}
    assert reasons == {
        f"the sample has {6 * PATCHES} patches of images and frames, but data.max_media_tokens is {5 * PATCHES}; "
        "raise data.max_media_tokens, or choose --on-too-long truncate"
    }


def test_a_video_is_never_cut(dataset: Path, assets: Assets) -> None:
    loader = open_loader(dataset, assets, seq_length=40, on_too_long="truncate", micro_batch_size=1)
    for batch in take(loader, 8):
        (tokens,) = assets.plan.video_tokens([VideoShape(2, 20, 30)])
        num_video = int((batch.input_ids == assets.plan.video_token_id).sum())
        assert num_video in (0, len(tokens), 4 * 4 + 1, 6 * 4 + 1)


def test_a_conversation_ends_before_the_video_that_exceeds_the_budget(assets: Assets, tmp_path: Path) -> None:
    frames = {f"v.{i}.png": noise(20, 30, i) for i in range(8)}
    names = list(frames)
    talk = messages(("user", "<video>What?"), ANSWER, ("user", "And <video>now?"), ANSWER)
    write_tar(tmp_path / "0.tar", {f"{i}": {"json": talk | {"videos": [names[:2], names[2:]]}, **frames} for i in "ab"})
    options: dict[str, Any] = {"micro_batch_size": 1, "num_streams": 1, "seq_length": 256, "on_too_long": "truncate"}
    index(tmp_path)
    for most, kept in ((8, 8), (7, 2), (2, 2)):
        batches = take(open_loader(tmp_path, assets, max_media_tokens=most * PATCHES, **options), 2)
        assert [len(batch.media[PIXEL_VALUES]) for batch in batches] == [kept, kept]
        assert [batch.sums["num_truncated"] for batch in batches] == [(int(kept < 8), 0)] * 2
        assert not any(batch.skipped for batch in batches)
        answers = assets.tokenizer.decode(batches[0].input_ids[0]).count("It moves.")
        assert answers == (2 if kept == 8 else 1)


def test_frames_that_are_only_named(assets: Assets, tmp_path: Path) -> None:
    """Lines of a jsonl file with frames in a store; names that are not there leave the sample out."""
    (tmp_path / "frames").mkdir()
    clip = video(3)
    for number, frame in enumerate(clip.frames):
        (tmp_path / "frames" / f"{number}.png").write_bytes(frame)
    talk = messages(("user", "<video>What happens?"), ANSWER)
    good = talk | {"videos": [["0.png", "1.png", "2.png"]]}
    gone, outside = talk | {"videos": [["0.png", "9.png"]]}, talk | {"videos": [["../0.png"]]}
    lines = [good, gone, good, outside]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    energon(["prepare", str(tmp_path / "talk.jsonl")], standalone_mode=False)
    entry = "{weight: 1, path: talk.jsonl, aux: {images: 'filesystem://frames'}}"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    (tmp_path / "blend.yaml").write_text(f"{head}      - {entry}\n")
    batches = take(open_loader(tmp_path / "blend.yaml", assets, num_streams=1, micro_batch_size=1), 4)
    (tokens,) = assets.plan.video_tokens([VideoShape(3, 20, 30)])
    expected = assets.images.tiles([MediaSpan(clip, 0, tokens)])
    assert all(torch.equal(batch.media[PIXEL_VALUES], expected) for batch in batches)
    assert {skip.reason for batch in batches for skip in batch.skipped} == {
        f"the image '9.png' is not in {tmp_path / 'frames'}",
        "the image '../0.png' is outside of its store; names must be relative to it",
    }


def test_check_counts_videos_and_frames(
    dataset: Path, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data-path", str(dataset), "--tokenizer-load-dir", str(hf), "--full", "--num-workers", "0"]
    assert check([*flags, "--json", str(tmp_path / "report.json"), "--show", "2"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["images_per_sample"] == {"0": 12, "2": 4}
    assert report["videos_per_sample"] == {"0": 4, "1": 12}
    assert report["frames_per_video"] == {"2": 4, "4": 4, "6": 4}
    assert report["epoch"] | {"tokens": 0} == {
        "samples": 16,
        "tokens": 0,
        "images": 8,
        "videos": 12,
        "frames": 48,
    } | {"audios": 0}
    printed = capsys.readouterr().out
    assert "frames per video: 2: 4, 4: 4, 6: 4" in printed and "12 videos, 48 frames" in printed
    assert "<video \N{MULTIPLICATION SIGN}9>" in printed
