"""Folders that have preprocessor_config.json alone take videos as transformers takes them."""

from __future__ import annotations

from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from transformers import AutoProcessor, AutoVideoProcessor

from llava_mcore.config.sections.data import PixelRange
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.processors.pixel_range import FRAMES, IMAGES, write_pixel_range
from llava_mcore.media.batch_fields import PIXEL_SCALE, PIXEL_VALUES, normalize
from llava_mcore.media.media import VideoShape
from tests.helpers.class_checks import batch_of
from tests.helpers.older_folders import as_published
from tests.helpers.tiny_hf import make_onevision
from tests.helpers.tiny_qwen import make_each_kind
from tests.unit.models.test_qwen import CONVERSATIONS, theirs_of

OLDER = {"min_pixels": 400, "max_pixels": 5000}
"""Limits as published folders of Qwen2-VL and Qwen2.5-VL have them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_each_kind(tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_older_folders_take_videos_as_transformers_does(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    folder = as_published(folders[name], tmp_path / "old", **OLDER)
    assets = load_assets(folder)
    assert not {"<image>", "<video>"} & assets.refused.keys()
    assert assets.pixels == assets.video_pixels == PixelRange(*OLDER.values())
    for conversation in CONVERSATIONS:
        batch, theirs = batch_of(assets, [conversation], packed=True), theirs_of(folder, conversation)
        n = theirs["input_ids"].shape[1]
        assert batch.input_ids[0, :n].tolist() == theirs["input_ids"][0].tolist()
        pixels = normalize(batch.media[PIXEL_VALUES], batch.media[PIXEL_SCALE])
        found = [theirs[k] for k in ("pixel_values", "pixel_values_videos") if k in theirs]
        assert torch.equal(pixels.sort(0).values, torch.cat(found or [pixels[:0]]).sort(0).values)


def test_import_and_export_keep_an_older_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = as_published(folders["qwen2_vl"], tmp_path / "old", **OLDER)
    import_hf(folder, tmp_path / "m")
    export_hf(tmp_path / "m", tmp_path / "out")
    assert not (tmp_path / "out" / "processor_config.json").exists()
    for name in ("preprocessor_config.json", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert load_assets(tmp_path / "out").video_pixels == PixelRange(*OLDER.values())


def test_an_image_processor_whose_name_says_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers looks at config.json then, which a folder with only tokenizer and processor lacks."""
    folder = as_published(
        folders["qwen2_5_vl"], tmp_path / "old", image_processor_type="Qwen2VLImageProcessorFast", **OLDER
    )
    (folder / "config.json").unlink()
    assets = load_assets(folder, checkpoint_hf_dir=folders["qwen2_5_vl"])
    assert assets.video_pixels.largest == 73728, "the settings for videos of the checkpoint's folder come first"
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "bare" / name).write_bytes((folders["qwen2_5_vl"] / name).read_bytes())
    assets = load_assets(folder, checkpoint_hf_dir=tmp_path / "bare")
    assert "<video>" not in assets.refused and assets.video_pixels == PixelRange(*OLDER.values())


def test_an_older_folder_of_onevision(tmp_path: Path) -> None:
    """A folder as it was first published gives the tokens of its processor, also for videos."""
    folder = as_published(make_onevision(tmp_path / "hf"), tmp_path / "old")
    assets, theirs = load_assets(folder), AutoProcessor.from_pretrained(folder)
    assert "<video>" not in assets.refused and assets.video_pixels == PixelRange()
    frames = torch.zeros(3, 3, 40, 50, dtype=torch.uint8)
    made = theirs(text="<video>", videos=[frames], return_tensors="pt")
    (tokens,) = assets.plan.video_tokens([VideoShape(3, 40, 50)])
    assert tokens.ids.tolist() == made["input_ids"][0].tolist()


def test_a_class_that_transformers_would_mistake_is_refused_with_the_file_to_write(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Qwen3-VL has Qwen2-VL's image processor, and the range of its video processor means something else."""
    folder = as_published(folders["qwen3_vl"], tmp_path / "old")
    reason = load_assets(folder).refused["<video>"]
    assert "is Qwen2VLVideoProcessor, but Qwen3VLForConditionalGeneration takes Qwen3VLVideoProcessor" in reason
    assert f"write {folder / 'video_preprocessor_config.json'}" in reason
    AutoVideoProcessor.from_pretrained(folders["qwen3_vl"]).save_pretrained(folder)
    assert "<video>" not in load_assets(folder).refused


def test_ranges_are_written_where_pictures_and_videos_share_a_file(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = as_published(folders["qwen2_vl"], tmp_path / "old", **OLDER)
    write_pixel_range(folder, PixelRange(900, 3000), FRAMES)
    assets = load_assets(folder)
    assert assets.pixels == PixelRange(*OLDER.values()) and assets.video_pixels == PixelRange(900, 3000)
    write_pixel_range(folder, PixelRange(800, 2000), IMAGES)
    assets = load_assets(folder)
    assert assets.pixels == PixelRange(800, 2000) and assets.video_pixels == PixelRange(900, 3000)
    theirs = AutoProcessor.from_pretrained(folder)
    assert theirs.video_processor.size["longest_edge"] == 3000 and theirs.image_processor.size["longest_edge"] == 2000
