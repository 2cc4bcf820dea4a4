"""build --image-size: the features are those of the source tower at that size, in a folder that trains and serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor, BitImageProcessor, CLIPVisionModel, SiglipVisionModel

from llava_mcore.cli import import_hf
from llava_mcore.cli.build import main
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.errors import ConfigError
from llava_mcore.models.vision.features import image_side
from tests.helpers.build_checks import assert_converts
from tests.helpers.build_parts import load, save_vision, tensors_of
from tests.helpers.class_tokens import assert_same_ids
from tests.helpers.photos import CHINA

pytest_plugins = ("tests.helpers.build_fixtures",)

KINDS = ("clip", "siglip", "dinov2", "dinov2_with_registers", "internvit")
ASKED = {"clip": CLIPVisionModel, "siglip": SiglipVisionModel}
"""Towers that interpolate when they are asked to; the others always do."""


@pytest.mark.parametrize("side", [28, 84])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_features_are_the_interpolated_towers(build_tiny: Any, tiny_parts: Any, kind: str, side: int) -> None:
    source = tiny_parts(kind)
    out = build_tiny(vision=source, image_size=side)
    tower = ASKED.get(kind, AutoModel).from_pretrained(source)
    model, processor = load(out), AutoProcessor.from_pretrained(out)
    assert image_side(model.config.vision_config) == side != image_side(tower.config)
    batch = processor(images=Image.effect_noise((90, 70), 80).convert("RGB"), text="<image>", return_tensors="pt")
    pixels = batch["pixel_values"]
    assert pixels.shape[-2:] == (side, side)
    how = {"interpolate_pos_encoding": True} if kind in ASKED else {}
    expected = tower(pixels, output_hidden_states=True, **how).hidden_states
    found = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    tokens = (side // 14) ** 2 + (4 if kind == "dinov2_with_registers" else 0)
    assert (batch["input_ids"] == model.config.image_token_id).sum() == model.config.image_seq_length == tokens
    before, after = tower.state_dict(), model.model.vision_tower.state_dict()
    assert {k for k in before if not torch.equal(before[k], after[k])} == {k for k in before if "position" in k}


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_here_and_goes_back(build_tiny: Any, tiny_parts: Any, tmp_path: Path, kind: str) -> None:
    out = build_tiny(vision=tiny_parts(kind), image_size=70)
    assert_converts(out, load(out), tmp_path)


def test_with_a_pixel_shuffle(build_tiny: Any, tiny_parts: Any, tmp_path: Path) -> None:
    """Its squares of two by two features need an even number of patches."""
    out = build_tiny(vision=tiny_parts("internvit"), architecture="internvl", image_size=84)
    config = load(out).config
    assert (config.model_type, config.image_seq_length) == ("internvl", 9)
    assert_same_ids(out, load_assets(out), [(56, 56), (30, 200)])
    flags = ["--hf-dir", str(out), "--megatron-dir", str(tmp_path / "m"), "--workers", "1"]
    assert import_hf.main([*flags, "--logits", str(CHINA)]) == 0
    with pytest.raises(ConfigError, match="--connector pixel_shuffle: "):
        build_tiny(vision=tiny_parts("internvit"), connector="pixel_shuffle", image_size=70)


def test_the_towers_own_size(build_tiny: Any, tiny_parts: Any, tmp_path: Path) -> None:
    """SigLIP's 60 px are not a multiple of 14: its own size is taken, and 56 px have as many patches."""
    source = tiny_parts("siglip")
    usual, own, less = (build_tiny(vision=source, image_size=size) for size in (None, 60, 56))
    tensors = [tensors_of(folder, "") for folder in (usual, own, less)]
    assert all(torch.equal(tensors[0][k], other[k]) for other in tensors[1:] for k in tensors[0])
    assert (usual / "config.json").read_text() == (own / "config.json").read_text()
    assert image_side(load(less).config.vision_config) == 56


@torch.inference_mode()
def test_a_crop_and_another_dtype(build_tiny: Any, tmp_path: Path) -> None:
    """As facebook/dinov2-base is: images are made a little larger and cut. At the new size all is kept."""
    source = save_vision(tmp_path / "tower", "clip")
    BitImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56}).save_pretrained(source)
    out = build_tiny(vision=source, image_size=84, dtype="bfloat16")
    images = AutoProcessor.from_pretrained(out).image_processor
    assert images.size == {"shortest_edge": 84} and images.crop_size == {"height": 84, "width": 84}
    tower = CLIPVisionModel.from_pretrained(source, dtype=torch.bfloat16)
    pixels = images(images=Image.new("RGB", (90, 70), "red"), return_tensors="pt")["pixel_values"]
    expected = tower(pixels, interpolate_pos_encoding=True).last_hidden_state
    found = load(out).model.vision_tower(pixels).last_hidden_state
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_command_line(tiny_parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes that do not fit the patches are refused with the nearest ones; a fitting one is built."""
    argv = ["--save-dir", str(tmp_path / "out"), "--text-model", str(tiny_parts("llama"))]
    argv += ["--vision-model", str(tiny_parts("clip"))]
    with pytest.raises(SystemExit):
        main([*argv, "--image-size", "large"])
    assert "argument --image-size: invalid int value: 'large'" in capsys.readouterr().err
    assert main([*argv, "--image-size", "100"]) == 2
    assert "the nearest are 98 and 112" in capsys.readouterr().err
    assert main([*argv, "--image-size", "98"]) == 0
    said = capsys.readouterr().out
    assert "positions: those for 56 px, interpolated to --image-size 98 px" in said and "49 tokens per image" in said
