"""The tokens of pictures of many sizes, compared with those of a folder's own processor."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoProcessor

from llava_mcore.data.encoding.assets import Assets
from llava_mcore.data.encoding.picture_header import MOST_RATIO
from llava_mcore.data.encoding.placeholders import expand
from llava_mcore.data.samples import Turn
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import features_per_tile
from llava_mcore.models.media import Size
from llava_mcore.pixels import normalize
from tests.helpers.encoding import tiles


def assert_same_ids(folder: Path, assets: Assets, sizes: list[Size], together: int = 3) -> None:
    """Compare the ids of conversations with some pictures each with those of the folder's processor, and the tiles."""
    processor, per_tile = AutoProcessor.from_pretrained(folder), features_per_tile(load_hf_config(folder))
    for some in itertools.batched(sizes, together):
        turns = [Turn("user", "What?" + "\n<image>" * len(some)), Turn("assistant", "This.")]
        text = assets.chat.render(turns)
        found = expand(
            assets.chat.text_tokens(turns, num_images=len(some)), assets.plan.placeholders, assets.plan.tokens(some)
        )
        pictures = [Image.new("RGB", (width, height)) for height, width in some]
        expected = processor(images=pictures, text=text, add_special_tokens=False, return_tensors="pt")
        assert found.input_ids.tolist() == expected["input_ids"][0].tolist(), some
        tokens = assets.plan.tokens(some)
        num_rows = expected["pixel_values"].flatten(0, -4).shape[0]
        assert sum(item.num_rows for item in tokens) == num_rows, some
        assert [item.num_features for item in tokens] == [item.num_rows * per_tile for item in tokens]


def random_sizes(number: int, longest: int, seed: int = 0) -> list[Size]:
    """Sizes of every proportion that is read, small ones and equal sides among them."""
    choose = random.Random(seed)
    found: list[Size] = []
    while len(found) < number:
        height = round(longest ** choose.random())
        width = choose.choice([height, round(longest ** choose.random()), choose.randint(1, longest)])
        if max(height, width) <= MOST_RATIO * min(height, width):
            found.append((height, width))
    return found


def assert_same_tiles(folder: Path, assets: Assets, sizes: Sequence[Size]) -> None:
    """Compare, bit for bit, the tiles of noise with those of the folder's processor, each picture alone.

    They are normalized on the device from bytes where torchvision makes them, not Pillow.
    """
    processor = AutoProcessor.from_pretrained(folder)
    dtype = torch.uint8 if processor.image_processor.backend == "torchvision" else torch.float32
    for height, width in sizes:
        picture = Image.effect_noise((width, height), 200).convert("RGB")
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        made = processor(images=picture, text=processor.image_token, return_tensors="pt")
        found = tiles(assets.images, [buffer.getvalue()])
        assert found.dtype == dtype
        expected = made["pixel_values"].flatten(0, -4)
        assert torch.equal(normalize(found, assets.images.pixel_scale), expected), (height, width)
