"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any size have the processor's tokens."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.tokens import expand
from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.errors import DataError
from llava_mcore.media.batch_fields import PIXEL_SCALE, PIXEL_VALUES, normalize
from llava_mcore.media.media import VideoShape
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.vision.patch_plan import PatchPlan
from tests.helpers.class_checks import batch_of
from tests.helpers.tiny_qwen import OWN_TOWERS, make_each_kind
from tests.helpers.videos import noise

NUM_SIZES = [(999, 3), pytest.param(4_014, 18, marks=pytest.mark.long)]
"""And how many of them are in each conversation."""
NUM_ENCODED = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_each_kind(tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize(("number", "together"), NUM_SIZES)
@pytest.mark.parametrize("name", OWN_TOWERS)
def test_pictures_of_any_size_have_the_processors_tokens(
    folders: dict[str, Path], name: str, number: int, together: int
) -> None:
    """The ids of some images and the text around them, and the patches that the processor makes of each."""
    assets, processor = load_assets(folders[name]), AutoProcessor.from_pretrained(folders[name])
    assert isinstance(assets.plan, PatchPlan)
    turns = [Turn("user", "What?" + "\n<image>" * together), Turn("assistant", "This.")]
    text, choose = assets.chat.render(turns), random.Random(0)
    sides = iter(lambda: round(2000 ** choose.random()) + 9, None)
    sizes = (size for size in itertools.batched(sides, 2) if max(size) / min(size) <= 200)
    for some in itertools.batched(itertools.islice(sizes, number), together):
        items = assets.plan.tokens(some)
        found = expand(assets.chat.text_tokens(turns, num_images=together), assets.plan.placeholders, items)
        pictures = [Image.new("RGB", (width, height)) for height, width in some]
        made = processor(images=pictures, text=text, add_special_tokens=False, return_tensors="pt")
        assert found.input_ids.tolist() == made["input_ids"][0].tolist(), some
        assert made["image_grid_thw"].tolist() == [list(assets.plan.grid_of(*size)) for size in some]
        assert len(made["pixel_values"]) == sum(item.num_rows for item in items), some
    with pytest.raises(DataError, match="an image of 2001 x 10 pixels: absolute aspect ratio must be smaller"):
        assets.plan.tokens([(10, 2001)])


@pytest.mark.parametrize("name", OWN_TOWERS)
def test_patches_of_many_sizes_are_the_processors(folders: dict[str, Path], name: str) -> None:
    """Bit for bit."""
    assets, choose = load_assets(folders[name]), random.Random(4)
    processor = AutoProcessor.from_pretrained(folders[name]).image_processor
    for _ in range(40):
        picture = noise(choose.randint(4, 400), choose.randint(4, 400))
        turns = Turn("user", "<image>"), Turn("assistant", "yes.")
        media = batch_of(assets, [Conversation(turns, (picture,))], packed=True).media
        expected = processor(decode_image(picture), return_tensors="pt")["pixel_values"]
        assert torch.equal(normalize(media[PIXEL_VALUES], media[PIXEL_SCALE]), expected)


@pytest.mark.parametrize("name", OWN_TOWERS)
def test_the_tower_makes_as_many_features(folders: dict[str, Path], name: str) -> None:
    plan, choose = load_assets(folders[name]).plan, random.Random(2)
    sizes = [(choose.randint(1, 160), choose.randint(1, 160)) for _ in range(NUM_ENCODED)]
    pictures = [torch.zeros(3, *size, dtype=torch.uint8) for size in sizes]
    made = AutoProcessor.from_pretrained(folders[name]).image_processor(pictures, return_tensors="pt")
    items = plan.tokens(sizes)
    model: Any = architecture_of(load_hf_config(folders[name])).model_class.from_pretrained(folders[name])
    with torch.inference_mode():
        features = model.model.get_image_features(made["pixel_values"], made["image_grid_thw"]).pooler_output
    assert [len(x) for x in features] == [item.num_features for item in items] == [len(item) for item in items]


def test_video_shapes_have_the_processors_tokens(folders: dict[str, Path]) -> None:
    """The pixels are made, since the number of patches depends on the frames in ways that versions differ in."""
    choose = random.Random(1)
    for name in OWN_TOWERS:
        plan = load_assets(folders[name]).plan
        processor = AutoProcessor.from_pretrained(folders[name])
        for _ in range(60):
            shape = VideoShape(choose.randint(2, 9), choose.randint(12, 120), choose.randint(12, 120), 4.0)
            (item,) = plan.video_tokens([shape])
            frames = torch.zeros(shape.num_frames, 3, shape.height, shape.width, dtype=torch.uint8)
            about = VideoMetadata(shape.num_frames, fps=shape.fps, frames_indices=list(range(shape.num_frames)))
            made = processor(
                text="<|video_pad|>",
                videos=[frames],
                video_metadata=[about],
                do_sample_frames=False,
                return_tensors="pt",
            )
            assert item.ids.tolist() == made["input_ids"][0].tolist(), (name, shape)
            assert item.num_rows == len(made["pixel_values_videos"])
    with pytest.raises(DataError, match="a video has 1 frame, but Qwen3_5Model needs 2: prepare it with"):
        plan.video_tokens([VideoShape(1, 23, 64)])
