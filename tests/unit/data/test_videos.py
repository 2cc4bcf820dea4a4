"""Videos as frames: what the loader makes of them is what Hugging Face's processor and model make."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaOnevisionConfig, LlavaOnevisionProcessor, SiglipVisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.encode.tokens import video_shape
from llava_mcore.data.samples import Conversation, TokenConversation, Turn, Video
from llava_mcore.errors import DataError
from llava_mcore.media.batch_fields import (
    NEWLINE_POSITIONS,
    RESIZED_POSITIONS,
    RESIZED_ROWS,
    RESIZED_WEIGHTS,
    normalize,
)
from llava_mcore.media.media import MediaTokens, Processing, VideoShape
from llava_mcore.models.architectures.registry import architecture_of
from tests.helpers.cases import media_plan
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_hf_llava, make_onevision
from tests.helpers.videos import as_arrays, noise, video

NUM_SHAPES = 10_000
NEWLINE = -1.0


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_onevision(tmp_path_factory.mktemp("onevision"))


@pytest.fixture(scope="module")
def assets(hf: Path) -> Assets:
    return load_assets(hf)


def made(assets: Assets, images: list[bytes], videos: list[Video], *questions: str) -> TokenConversation:
    """Return the tokens of a talk with such questions."""
    turns = [turn for question in questions for turn in (Turn("user", question), Turn("assistant", "This."))]
    return tokenize(Conversation(tuple(turns), tuple(images), videos=tuple(videos)), assets, "k")


# -- tokens --------------------------------------------------------------------------------------------------------


def sequence(tokens: MediaTokens) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What stands at each token: the mean of the numbers of four features, or NEWLINE."""
    values, found = tokens.values, np.full(len(tokens), np.nan)
    found[values[NEWLINE_POSITIONS]] = NEWLINE
    found[values[RESIZED_POSITIONS]] = (values[RESIZED_ROWS] * values[RESIZED_WEIGHTS].astype(np.float64)).sum(-1)
    return found


def test_tokens_and_features_of_ten_thousand_shapes() -> None:
    """For towers of every size: the plan's tokens, the processor's, and the features that the model pools."""
    draw, nothing, compared = np.random.default_rng(0), None, set()
    plans: dict[int, Any] = {}
    for _ in range(NUM_SHAPES):
        side, frames = int(draw.integers(1, 29)), int(draw.integers(1, 17))
        if side not in plans:
            vision = SiglipVisionConfig(image_size=14 * side + 5, patch_size=14)
            config = LlavaOnevisionConfig(
                vision_config=vision,
                image_grid_pinpoints=[[vision.image_size] * 2],
                vision_feature_select_strategy="full",
                video_token_id=7,
            )
            processing: Any = Processing(nothing, nothing, {}, object())  # type: ignore[arg-type]
            processor = object.__new__(LlavaOnevisionProcessor)
            processor.num_image_tokens, processor.video_token = side**2, "v"
            plans[side] = config, architecture_of(config).media(config, processing), processor
        config, plan, processor = plans[side]
        height, width = np.exp(draw.uniform(np.log(2), np.log(4000), 2)).astype(int).tolist()
        (tokens,) = plan.video_tokens([VideoShape(frames, height, width, 2.0)])
        served = processor.replace_video_token({"pixel_values_videos": [torch.empty(frames, 0)]}, 0)
        assert len(tokens) == len(served) and (tokens.ids == 7).all(), (side, frames)
        assert tokens.num_rows == frames and tokens.num_patches == tokens.num_features == frames * side**2
        if (side, frames) not in compared:
            compared.add((side, frames))
            numbers = torch.arange(frames * side**2, dtype=torch.float32).view(frames, side**2, 1)
            pooled = LlavaOnevisionModel.apply_pooling(SimpleNamespace(config=config), numbers)
            np.testing.assert_allclose(sequence(tokens)[:-1], pooled.flatten().numpy(), rtol=1e-6, atol=1e-3)
            assert sequence(tokens)[-1] == NEWLINE
    assert len(compared) == 28 * 16


def test_ids_and_pixels_are_hugging_faces(hf: Path, assets: Assets) -> None:
    """Images and videos in one conversation: the ids of AutoProcessor, and its pixels bit by bit."""
    images = [noise(60, 140), noise(30, 31, 1)]
    videos = [video(5, 50, 90, fps=2.0), video(3, 120, 40, seed=9)]
    questions = ("<video>\nWhat <image> and\n<video>", "<image>\nAnd?")
    found = made(assets, images, videos, *questions)
    processor = AutoProcessor.from_pretrained(hf)
    turns = [turn for question in questions for turn in (Turn("user", question), Turn("assistant", "This."))]
    expected = processor(
        text=assets.chat.render(turns),
        images=[[Image.open(io.BytesIO(data)) for data in images]],
        videos=[as_arrays(clip) for clip in videos],
    )
    assert found.input_ids.tolist() == expected["input_ids"][0]
    assert not found.trained[np.isin(found.input_ids, assets.plan.placeholders)].any() and found.trained.any()
    assert [span.data for span in found.media] == [videos[0], images[0], videos[1], images[1]]
    pixels = assets.images.tiles(found.media)
    assert pixels.dtype == torch.uint8
    parts = normalize(pixels, assets.images.pixel_scale).split([span.tokens.num_rows for span in found.media])
    theirs = [*expected["pixel_values_videos"][:1], expected["pixel_values"][0][:1]]
    theirs += [*expected["pixel_values_videos"][1:], expected["pixel_values"][1][:1]]
    assert all(torch.equal(mine, other) for mine, other in zip(parts, theirs, strict=True))


def test_frames_are_seen_upright(assets: Assets) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    clip = Video((noise(20, 40, kind="JPEG", exif=exif), noise(40, 20, kind="JPEG")))
    assert video_shape(clip) == VideoShape(2, 40, 20, None)
    assert len(assets.images.tiles(made(assets, [], [clip], "<video>Which?").media)) == 2


def test_a_processor_of_its_own_mean(hf: Path, tmp_path: Path) -> None:
    """Frames and images that are normalized differently travel as numbers."""
    copy = copied(hf, tmp_path, lambda c: c["video_processor"].update(image_mean=[0.5] * 3))
    assets, clip = load_assets(copy), video(2)
    assert "<video>" not in assets.refused and not len(assets.images.pixel_scale)
    pixels = assets.images.tiles(made(assets, [noise(9, 9)], [clip], "<image><video>").media)
    theirs = AutoProcessor.from_pretrained(copy).video_processor([as_arrays(clip)], return_tensors="pt")
    assert torch.equal(pixels[-2:], theirs["pixel_values_videos"][0])


# -- what cannot be used -------------------------------------------------------------------------------------------

BROKEN = b"no image"
TOO_MANY = Limits(frames=4)
REFUSED: list[tuple[list[Video], str, Limits, str]] = [
    ([], "<video>What?", Limits(), "1 <video> in the conversation, but 0 videos"),
    ([video(1)], "What?", Limits(), "0 <video> in the conversation, but 1 videos"),
    ([video(1)], "<image>What?", Limits(), "1 <image> in the conversation, but 0 images"),
    ([Video(())], "<video>What?", Limits(), "video 0 has no frames"),
    ([video(1), Video((noise(4, 5), BROKEN))], "<video><video>What?", Limits(), "video 1, frame 1: the image cannot"),
    ([Video((noise(4, 5), noise(5, 4)))], "<video>What?", Limits(), "frame 1 has 4 x 5 pixels, but the first one has"),
    ([video(3), video(2)], "<video><video>What?", TOO_MANY, "its videos have 5 frames; the limit is 4 .max_frames"),
    ([video(3)], "<video>What?", Limits(sample_bytes=2000), "frames and audio clips have .* bytes; the limit is 2000"),
    ([video(1, 40, 40)], "<video>What?", Limits(image_pixels=999), "video 0, frame 0: .* 999"),
]


@pytest.mark.parametrize(("videos", "question", "limits", "reason"), REFUSED, ids=[row[3][:40] for row in REFUSED])
def test_samples_that_are_refused(
    assets: Assets, videos: list[Video], question: str, limits: Limits, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        made(dataclasses.replace(assets, limits=limits), [], videos, question)


def copied(hf: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a folder, its processor_config.json changed."""
    for file in hf.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target / "processor_config.json").read_text())
    change(settings)
    (target / "processor_config.json").write_text(json.dumps(settings))
    return target


UNUSABLE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.pop("video_processor"), "no video_processor in processor_config.json; write .*video_preprocessor"),
    (lambda c: c["video_processor"].update(size={"height": 30, "width": 40}), "makes frames of 3 x 30 x 40"),
    (lambda c: c["video_processor"].update(image_mean=[0.5, 0.5]), "the video processor cannot be used"),
    (lambda c: c["video_processor"].update(video_processor_type="No"), "the video processor in .* cannot be loaded"),
]


@pytest.mark.parametrize(("change", "reason"), UNUSABLE, ids=[row[1][:30] for row in UNUSABLE])
def test_without_a_video_processor_only_samples_with_videos_are_refused(
    hf: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    assets = load_assets(copied(hf, tmp_path, change))
    with pytest.raises(DataError, match=f"it has a video, but .*{reason}"):
        made(assets, [], [video(2)], "<video>What?")
    assert len(made(assets, [noise(9, 9)], [], "<image>What?").media) == 1


def test_a_class_without_videos_names_those_that_take_them(tmp_path: Path) -> None:
    make_hf_llava(tmp_path)
    with pytest.raises(
        DataError, match=r"LlavaForCond\w* does not support videos; classes that do: LlavaOnevisionForCond"
    ):
        made(load_assets(tmp_path), [], [video(2)], "<video>What?")


def test_a_template_without_videos(hf: Path, tmp_path: Path) -> None:
    """Videos are refused with the reason, and images still work."""
    template = tmp_path / "pictures_only.jinja"
    template.write_text(CHAT_TEMPLATE.replace("<video>", ""))
    assets = load_assets(hf, chat_template=str(template))
    assert "renders a question about a video as" in assets.refused["<video>"]
    assert made(assets, [noise(9, 9)], [], "<image>What?").media


MEDIA_FIRST = (
    "{% for m in messages %}{{ m.role }}: {% for kind in ('image', 'video') %}{% for p in m.content %}"
    "{% if p.type == kind %}<{{ kind }}>\n{% endif %}{% endfor %}{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{% if m.role == 'assistant' %}{% generation %}{{ p.text }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
"""As llava-hf's own template: in each turn first all images, then all videos, then the text."""


def test_a_template_that_moves_media(hf: Path, tmp_path: Path) -> None:
    """Each kind keeps its order, and every placeholder gets its own."""
    (tmp_path / "first.jinja").write_text(MEDIA_FIRST)
    assets = load_assets(hf, chat_template=str(tmp_path / "first.jinja"))
    images, videos = [noise(60, 140), noise(30, 31, 1)], [video(2), video(4, seed=9)]
    found = made(assets, images, videos, "<video>A <image> b <video> c <image>")
    assert [span.data for span in found.media] == [*images, *videos]
    processor, parts = AutoProcessor.from_pretrained(hf), ("video", "A", "image", "b", "video", "c", "image")
    said = {"A": "A ", "b": " b ", "c": " c "}
    content = [{"type": "text", "text": said[p]} if p in said else {"type": p} for p in parts]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "This."}]}
    text = processor.apply_chat_template([{"role": "user", "content": content}, answer], chat_template=MEDIA_FIRST)
    opened = [[Image.open(io.BytesIO(data)) for data in images]]
    theirs = processor(text=text, images=opened, videos=[as_arrays(clip) for clip in videos])
    assert found.input_ids.tolist() == theirs["input_ids"][0]


def test_the_tokenizer_and_the_config_must_name_the_same_token(hf: Path, tmp_path: Path) -> None:
    copy = copied(hf, tmp_path, lambda c: None)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"video_token_id": 9, "video_token_index": 9}))
    assert load_assets(copy).refused["<video>"] == "video_token_id is 9 in config.json, but <video> is 5"


def test_tokens_of_onevisions_own_geometry() -> None:
    """The number that docs/data.md gives."""
    config = LlavaOnevisionConfig(vision_config=SiglipVisionConfig(image_size=384, patch_size=14))
    config.vision_feature_select_strategy = "full"
    (tokens,) = media_plan(config).video_tokens([VideoShape(8, 480, 640)])
    assert len(tokens) == 8 * 14 * 14 + 1 == 1569
