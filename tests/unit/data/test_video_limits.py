"""The pixels of frames, videos without frames per second, and videos of a single frame."""

from __future__ import annotations

import json
import logging
import random
import tarfile
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
import yaml
from transformers import AutoProcessor, Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

from llava_mcore.cli import check as check_command
from llava_mcore.cli import prepare as prepare_command
from llava_mcore.config.sections.data import DataConfig, PixelRange
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.validation_data import ValidationData
from llava_mcore.data.processors.pixel_range import FRAMES, write_pixel_range
from llava_mcore.errors import DataError
from llava_mcore.media.media import VideoShape
from tests.helpers.bad_data_makers import index, messages, write_tar
from tests.helpers.tiny_hf import make_hf_llava, make_onevision
from tests.helpers.tiny_qwen import OWN_TOWERS, make_each_kind
from tests.helpers.videos import noise
from tests.unit.data.test_data_loader import open_loader, take

RECIPE = Path(__file__).parents[3] / "examples" / "qwen2.5-vl-7b" / "finetune.yaml"
TALK = messages(("user", "<video>What happens?"), ("assistant", "It moves."))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_each_kind(tmp_path_factory.mktemp("qwen"))


# -- the range of frames -----------------------------------------------------------------------------------------------

RANGES = [PixelRange(2000, 4000), PixelRange(smallest=6000), PixelRange(largest=1000)]


@pytest.mark.parametrize("pixels", RANGES, ids=str)
@pytest.mark.parametrize("name", OWN_TOWERS)
def test_a_range_of_frames_is_applied_as_the_processor_would(
    folders: dict[str, Path], name: str, pixels: PixelRange, tmp_path: Path
) -> None:
    """The tokens are those of the folder as it is exported; in Qwen3-VL, more frames have fewer pixels each."""
    assets, choose = load_assets(folders[name], video_pixels=pixels), random.Random(2)
    assert assets.video_pixels == PixelRange(pixels.smallest or 24 * 24, pixels.largest or 96 * 96 * 8)
    assert assets.pixels == PixelRange(24 * 24, 96 * 96)
    for file in folders[name].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_pixel_range(tmp_path, assets.video_pixels, FRAMES)
    assert load_assets(tmp_path).pixels == assets.pixels and load_assets(tmp_path).video_pixels == assets.video_pixels
    processor, differ = AutoProcessor.from_pretrained(tmp_path), False
    for _ in range(20):
        shape = VideoShape(choose.randint(2, 9), choose.randint(20, 120), choose.randint(20, 120), 2.0)
        about = VideoMetadata(shape.num_frames, fps=shape.fps, frames_indices=list(range(shape.num_frames)))
        frames = torch.zeros(shape.num_frames, 3, shape.height, shape.width, dtype=torch.uint8)
        given: dict[str, Any] = {"videos": [frames], "video_metadata": [about], "do_sample_frames": False}
        made = processor(text="<|video_pad|>", return_tensors="pt", **given)
        (item,) = assets.plan.video_tokens([shape])
        assert item.ids.tolist() == made["input_ids"][0].tolist(), shape
        differ |= len(item) != len(load_assets_once(folders[name]).plan.video_tokens([shape])[0])
    assert differ, "without the range they are others"


_known: dict[Path, Any] = {}


def load_assets_once(folder: Path) -> Any:
    """Return the assets of a folder without options."""
    if folder not in _known:
        _known[folder] = load_assets(folder)
    return _known[folder]


def test_ranges_of_frames_that_cannot_be_used(folders: dict[str, Path], tmp_path: Path) -> None:
    cases = [
        ("qwen2_vl", PixelRange(5000, 4000), "--video-min-pixels 5000 and --video-max-pixels 4000: frames would have"),
        ("qwen2_vl", PixelRange(100, 143), r"and at least 144, the pixels of a token"),
        ("qwen3_vl", PixelRange(100, 287), r"all frames of a video together would have .* at least 288"),
    ]
    for name, pixels, message in cases:
        with pytest.raises(DataError, match=message):
            load_assets(folders[name], video_pixels=pixels)
    make_hf_llava(tmp_path / "llava")
    with pytest.raises(DataError, match=r"--video-max-pixels 4000 cannot be used: Llava\w+ does not support videos"):
        load_assets(tmp_path / "llava", video_pixels=PixelRange(largest=4000))
    with pytest.raises(DataError, match=r"cannot be used: LlavaOnevision\w+ does not resize frames to a range"):
        load_assets(make_onevision(tmp_path / "onevision"), video_pixels=PixelRange(largest=4000))


def test_a_resumed_loader_keeps_the_range_of_frames(folders: dict[str, Path], films: Path) -> None:
    loader = open_loader(films, load_assets(folders["qwen2_vl"]))
    take(loader, 1)
    state = loader.state()
    loader.close()
    other = load_assets(folders["qwen2_vl"], video_pixels=PixelRange(largest=5000))
    with pytest.raises(DataError, match=r"data\.video_max_pixels: saved with 73728, now 5000"):
        open_loader(films, other, saved=[state])


def test_the_recipe_holds_a_clip() -> None:
    """examples/qwen2.5-vl-7b: 8 frames of 1920 x 1080, which have 10,764 tokens with the published limits."""
    data = yaml.safe_load(RECIPE.read_text())["data"]
    readme = (RECIPE.parent / "README.md").read_text()
    limit = data["video_max_pixels"]
    assert readme.count(f"--video-max-pixels {limit}") == 3, "prepare, check and evaluate get the same limit"
    full = yaml.safe_load((RECIPE.parent / "full.yaml").read_text())["data"]
    assert full["video_max_pixels"] == limit, "and training of everything"
    numbers = []
    for largest in (12_845_056, data["video_max_pixels"]):
        videos = Qwen2VLVideoProcessor(size={"shortest_edge": 3136, "longest_edge": largest})
        frames = torch.empty(8, 3, 1080, 1920, dtype=torch.uint8, device="meta")
        made = videos([frames], do_rescale=False, do_normalize=False, return_tensors="pt")
        numbers.append(int(made["video_grid_thw"].prod()) // 4)
    assert numbers[0] == 10_764 > data["seq_length"] and numbers[1] <= data["seq_length"] // 2


# -- frames per second -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 samples with a video each; every second one says its frames per second."""
    folder = tmp_path_factory.mktemp("films")
    frames = {f"v.{i}.png": noise(30, 40, i) for i in range(4)}
    said = [{"frames": list(frames), "fps": 1.0}, {"frames": list(frames)}]
    parts = {f"{i:03d}": {"json": TALK | {"videos": [said[i % 2]]}, **frames} for i in range(16)}
    write_tar(folder / "000000.tar", parts)
    return index(folder)


@pytest.mark.parametrize(("name", "depends"), [("qwen2_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", True)])
def test_classes_whose_tokens_or_positions_depend_on_time(folders: dict[str, Path], name: str, depends: bool) -> None:
    """`timed` says whether the rate of frames changes tokens or positions."""
    plan = load_assets_once(folders[name]).plan
    slow, unknown = plan.video_tokens([VideoShape(4, 30, 40, 1.0), VideoShape(4, 30, 40)])
    assert slow.positions is not None and unknown.positions is not None
    same = slow.ids.tolist() == unknown.ids.tolist() and slow.positions.tolist() == unknown.positions.tolist()
    assert plan.timed is depends is not same


@pytest.mark.parametrize(("name", "times"), [("qwen2_vl", 0), ("qwen2_5_vl", 1)])
def test_the_loader_warns_once(
    folders: dict[str, Path], films: Path, name: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = open_loader(films, load_assets_once(folders[name]))
    with caplog.at_level(logging.WARNING):
        take(loader, 8)
    loader.close()
    assert warnings_about_fps(caplog) == times


def warnings_about_fps(caplog: pytest.LogCaptureFixture) -> int:
    found = [record.getMessage() for record in caplog.records if "has no fps" in record.getMessage()]
    assert all("count as 24 frames per second" in message for message in found)
    return len(found)


@pytest.mark.parametrize(("name", "times"), [("qwen2_vl", 0), ("qwen2_5_vl", 1)])
def test_validation_warns_once(
    folders: dict[str, Path], films: Path, name: str, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blend = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
    blend += f"  train: {{path: {films}}}\n  val: {{path: {films}, split_part: train}}\n"
    (tmp_path / "blend.yaml").write_text(blend)
    data = DataConfig(path=tmp_path / "blend.yaml", num_workers=0, seq_length=512)
    part = ValidationData(data, load_assets_once(folders[name]), micro_batch_size=1, seed=1)
    with caplog.at_level(logging.WARNING):
        passes = [len(list(part.open(0, 1, 0))) for _ in range(2)]
    assert passes[0] == passes[1] > 0
    assert warnings_about_fps(caplog) == times


@pytest.mark.parametrize(("name", "number"), [("qwen2_vl", 0), ("qwen3_vl", 8)])
def test_check_counts_videos_without_fps(
    folders: dict[str, Path], films: Path, name: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data-path", str(films), "--tokenizer-load-dir", str(folders[name]), "--full", "--num-workers", "0"]
    assert check_command.main([*flags, "--json", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["videos_without_fps"] == number
    said = f"note: {number} of 16 videos have no fps and count as 24 frames per second" in capsys.readouterr().out
    assert said is bool(number)


def rates(folder: Path) -> list[float | None]:
    """Return the fps of all videos of a shard."""
    with tarfile.open(folder / "000000.tar") as tar:
        files = [tar.extractfile(name) for name in sorted(tar.getnames()) if name.endswith(".json")]
        clips = [clip for file in files if file is not None for clip in json.load(file)["videos"]]
    return [clip.get("fps") if isinstance(clip, dict) else None for clip in clips]


def test_prepare_can_be_told_the_frames_per_second(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag for a source, a key of a listed one; what a video says itself comes first."""
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(noise(30, 40, i))
    frames = ["0.png", "1.png"]
    rows = [TALK | {"videos": [clip]} for clip in (frames, {"frames": frames, "fps": 3})]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(tmp_path / "rows.jsonl"), "--num-workers", "0", "--keep-order"]
    counted = ["--tokenizer-load-dir", str(folders["qwen3_vl"]), "--frames-fps", "0.5"]
    assert prepare_command.main([*command, "--out", str(tmp_path / "a")]) == 0
    assert "a: 1 of 2 videos have no fps; models that use times count them as 24" in capsys.readouterr().out
    assert prepare_command.main([*command, "--out", str(tmp_path / "b"), *counted]) == 0
    assert "no fps" not in capsys.readouterr().out
    assert rates(tmp_path / "a") == [None, 3.0] and rates(tmp_path / "b") == [0.5, 3.0]
    assert prepare_command.main([*command, "--out", str(tmp_path / "c"), *counted[:1], str(folders["qwen2_vl"])]) == 0
    assert "no fps" not in capsys.readouterr().out, "this class does not use them"
    (tmp_path / "mix.yaml").write_text("sources: [{path: rows.jsonl, frames_fps: 4}]")
    mix = [str(tmp_path / "mix.yaml"), "--out", str(tmp_path / "mix"), "--num-workers", "0", "--keep-order"]
    assert prepare_command.main(mix) == 0
    assert rates(tmp_path / "mix" / "rows") == [4.0, 3.0]
    assert prepare_command.main([*mix, "--frames-fps", "2"]) == 2
    assert "--frames-fps belongs to each source" in capsys.readouterr().err


# -- a single frame ----------------------------------------------------------------------------------------------------


def test_shapes_that_the_model_refuses_are_skipped_by_prepare(folders: dict[str, Path], tmp_path: Path) -> None:
    """A video of one frame (only Qwen3-VL) and an image of odd proportions; the other rows are written."""
    (tmp_path / "0.png").write_bytes(noise(30, 40))
    (tmp_path / "wide.png").write_bytes(noise(3, 700))
    rows: list[dict[str, Any]] = [TALK | {"videos": [["0.png"] * number]} for number in (1, 2)]
    rows.append(messages(("user", "<image>What happens?"), ("assistant", "It moves.")) | {"images": ["wide.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    single = (
        "a video has 1 frame, but Qwen3VLModel needs 2: prepare it with a higher --video-fps, or list the frame twice"
    )
    wide = "an image cannot be used: it has 700 x 3 pixels: the longer side may be at most 200 times the shorter one"
    for name, expected in (("qwen3_vl", [single, wide]), ("qwen2_5_vl", [wide])):
        flags = ["--tokenizer-load-dir", str(folders[name]), "--num-workers", "0", "--max-skip-rate", "1"]
        flags.append("--keep-order")
        assert prepare_command.main([str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / name), *flags]) == 0
        skipped = [json.loads(line)["detail"] for line in (tmp_path / name / "skipped.jsonl").read_text().splitlines()]
        assert len(skipped) == len(expected)
        assert all(found.startswith(start) for found, start in zip(skipped, expected, strict=True))
