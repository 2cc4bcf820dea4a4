"""build --architecture: LLaVA-NeXT and LLaVA-OneVision of any tower and language model, images of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
)

from llava_mcore.cli.build import main
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.tokens import expand
from llava_mcore.data.samples import Turn
from llava_mcore.errors import ConfigError
from llava_mcore.media.media import VideoShape
from tests.helpers.build_checks import assert_converts
from tests.helpers.build_parts import VOCAB, load, tensors_of

pytest_plugins = ("tests.helpers.build_fixtures",)

CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "llava_next": (LlavaNextForConditionalGeneration, LlavaNextProcessor, LlavaNextImageProcessor),
    "llava_onevision": (LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor, LlavaOnevisionImageProcessor),
}
TOWERS = ("clip", "siglip", "dinov2")
PAIRS = [(name, tower) for name in CLASSES for tower in TOWERS]
SIZES = ((131, 57), (40, 300), (56, 56), (7, 9), (500, 333))
"""Heights and widths of images."""
QUESTION = "<image>\nWhat is this?"


def picture(size: tuple[int, int]) -> Image.Image:
    return Image.effect_noise((size[1], size[0]), 90).convert("RGB")


@pytest.mark.parametrize(("name", "tower"), PAIRS)
@torch.inference_mode()
def test_pictures_of_any_size(build_tiny: Any, tiny_parts: Any, name: str, tower: str) -> None:
    """Processor, model and our loader agree on every image."""
    out = build_tiny(vision=tiny_parts(tower), architecture=name)
    model, processor, assets = load(out), AutoProcessor.from_pretrained(out), load_assets(out)
    assert (type(model), type(processor), type(processor.image_processor)) == CLASSES[name]
    text = assets.chat.text_tokens([Turn("user", QUESTION), Turn("assistant", "It is.")], num_images=1)
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is."}], tokenize=False
    )
    for size in SIZES:
        batch = processor(images=picture(size), text=rendered, return_tensors="pt", add_special_tokens=False)
        assert model(**batch).logits.isfinite().all()
        tokens = assets.plan.tokens([size])
        assert expand(text, [model.config.image_token_id], tokens).input_ids.tolist() == batch["input_ids"][0].tolist()
        assert batch["pixel_values"].shape[1] == tokens[0].num_rows > 1


@pytest.mark.parametrize("name", CLASSES)
@torch.inference_mode()
def test_several_pictures_and_none(build_tiny: Any, name: str) -> None:
    """The processor's tokens are those of our plan, and logits are finite with and without images."""
    out = build_tiny(architecture=name)
    model, processor, assets = load(out), AutoProcessor.from_pretrained(out), load_assets(out)
    given = [[picture(size) for size in SIZES[:2]]] if name == "llava_onevision" else [picture(x) for x in SIZES[:2]]
    batch = processor(images=given, text="<image> and <image>", return_tensors="pt")
    expected = sum(len(tokens) for tokens in assets.plan.tokens(SIZES[:2]))
    assert (batch["input_ids"] == model.config.image_token_id).sum() == expected
    assert model(**batch).logits.isfinite().all()
    assert model(**processor(text="no image", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.parametrize("tower", TOWERS)
@torch.inference_mode()
def test_videos_pass_through_onevision(build_tiny: Any, tiny_parts: Any, tower: str) -> None:
    """The build's settings serve them too, and training takes them: tokens and pixels are the processor's."""
    out = build_tiny(vision=tiny_parts(tower), architecture="llava_onevision")
    model, processor = load(out), AutoProcessor.from_pretrained(out)
    frames = np.random.default_rng(0).integers(0, 255, (3, 40, 90, 3), dtype=np.uint8)
    batch = processor(videos=[frames], text="<video> What is this?", return_tensors="pt")
    assert (batch["input_ids"] == model.config.video_token_id).sum() == 3 * 2 * 2 + 1
    assets = load_assets(out)
    assert "<video>" not in assets.refused and assets.images.videos is not None
    (tokens,) = assets.plan.video_tokens([VideoShape(3, 40, 90)])
    assert len(tokens) == 3 * 2 * 2 + 1
    tiles = assets.plan.video_pixels(assets.images.videos, torch.from_numpy(frames).permute(0, 3, 1, 2), tokens)
    assert torch.equal(tiles, batch["pixel_values_videos"][0])
    assert model(**batch).logits.isfinite().all()


@pytest.mark.parametrize(("name", "tower"), PAIRS)
@torch.inference_mode()
def test_tiles_look_like_the_towers_own_pictures(build_tiny: Any, tiny_parts: Any, name: str, tower: str) -> None:
    """An image of a tile's size is not resized: base view and own processing are the same, bit by bit."""
    source = tiny_parts(tower)
    out = build_tiny(vision=source, architecture=name)
    own, images = AutoImageProcessor.from_pretrained(source), AutoImageProcessor.from_pretrained(out)
    side = load(out).config.vision_config.image_size
    tile = picture((side, side))
    expected = own(images=tile, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(images(images=tile, return_tensors="pt")["pixel_values"][0, 0], expected)
    assert images.resample == own.resample
    pinpoints = load(out).config.image_grid_pinpoints
    assert images.image_grid_pinpoints == pinpoints and len(pinpoints) == (5 if name == "llava_next" else 36)


@pytest.mark.parametrize(
    ("name", "tower", "text"),
    [
        ("llava_next", "clip", "mistral"),
        ("llava_next", "siglip", "gemma3"),
        ("llava_next", "dinov2", "qwen3"),
        ("llava_onevision", "clip", "llama"),
        ("llava_onevision", "siglip", "qwen2"),
        ("llava_onevision", "dinov2", "phi3"),
    ],
)
def test_it_trains_here_and_goes_back(
    build_tiny: Any, tiny_parts: Any, tmp_path: Path, name: str, tower: str, text: str
) -> None:
    source = tiny_parts(text, tie=text == "qwen2")
    out = build_tiny(source, tiny_parts(tower), architecture=name, expand_projector=text == "llama")
    model = load(out)
    assert_converts(out, model, tmp_path)
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(source).eval()(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits[..., :VOCAB], expected)


@pytest.mark.parametrize("name", CLASSES)
def test_the_seed_decides_newline_and_projector(build_tiny: Any, name: str) -> None:
    first, again, other = (tensors_of(build_tiny(architecture=name, seed=seed), "") for seed in (5, 5, 6))
    assert all(torch.equal(first[k], again[k]) for k in first)
    changed = {k for k in first if not torch.equal(first[k], other[k])}
    assert changed == {"image_newline", *(f"multi_modal_projector.linear_{i}.weight" for i in (1, 2))}
    usual = tensors_of(build_tiny(seed=5), "projector")
    assert all(torch.equal(usual[k], first[k]) for k in usual)
    assert 0.5 < first["image_newline"].std() * 64**0.5 < 1.5


@torch.inference_mode()
def test_with_another_picture_size(build_tiny: Any, tmp_path: Path) -> None:
    """Grids, tiles and conversion follow `image_size`."""
    out = build_tiny(architecture="llava_next", image_size=28)
    model, processor = load(out), AutoProcessor.from_pretrained(out)
    assert model.config.image_grid_pinpoints == [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    batch = processor(images=picture((61, 30)), text="<image>", return_tensors="pt")
    assert batch["pixel_values"].shape[-2:] == (28, 28) and model(**batch).logits.isfinite().all()
    assert_converts(out, model, tmp_path)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("tower", "options", "message"),
    [
        (
            "clip",
            {"vision_feature_select_strategy": "full"},
            "leaves 17 features of 16 patches: take .*strategy default",
        ),
        ("dinov2_with_registers", {}, "leaves 20 features of 16 patches: dinov2_with_registers has registers"),
        ("internvit", {}, "internvl_vision has an image_size of height and width"),
    ],
)
def test_features_that_are_no_square(
    build_tiny: Any, tiny_parts: Any, name: str, tower: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"--architecture {name}.*{message}"):
        build_tiny(vision=tiny_parts(tower), architecture=name, **options)


def test_command_line(tiny_parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown class is refused; a known one is built, and its numbers of tokens are printed."""
    argv = ["--save-dir", str(tmp_path / "out"), "--text-model", str(tiny_parts("qwen2"))]
    argv += ["--vision-model", str(tiny_parts("siglip")), "--architecture"]
    with pytest.raises(SystemExit):
        main([*argv, "llava_video"])
    assert "invalid choice: 'llava_video' (choose from" in capsys.readouterr().err
    assert main([*argv, "llava_next"]) == 0
    said = capsys.readouterr().out
    assert "16 tokens per tile, about 88 for an image with the largest grid" in said and "image_newline" in said
    argv[1] = str(tmp_path / "onevision")
    assert main([*argv, "llava_onevision"]) == 0
    assert "for an image with the largest grid, 4 per frame of a video" in capsys.readouterr().out
