"""The tokens of images of many sizes, compared with those of a folder's own processor."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.tokens import expand
from llava_mcore.data.processors.image_header import MOST_RATIO
from llava_mcore.data.samples import Turn
from llava_mcore.media.batch_fields import normalize
from llava_mcore.media.media import Size
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import features_per_tile
from tests.helpers.encoding import tiles

BATCH = 12


def assert_same_ids(folder: Path, assets: Assets, sizes: list[Size], together: int = 3) -> None:
    """Compare the ids of conversations with some images each with those of the folder's processor, and the tiles.

    The processor is given BATCH conversations at once, since a call takes longer than its images.
    """
    processor, per_tile = AutoProcessor.from_pretrained(folder), features_per_tile(load_hf_config(folder))
    conversations = list(itertools.batched(sizes, together))
    questions = {count: _question_about(assets, count) for count in set(map(len, conversations))}
    for batch in itertools.batched(conversations, BATCH):
        ids, num_rows, texts = [], 0, []
        for some in batch:
            text, text_tokens = questions[len(some)]
            tokens = assets.plan.tokens(some)
            ids.append(expand(text_tokens, assets.plan.placeholders, tokens).input_ids.tolist())
            texts.append(text)
            num_rows += sum(item.num_rows for item in tokens)
            assert [item.num_features for item in tokens] == [item.num_rows * per_tile for item in tokens]
        pictures = [[Image.new("RGB", (width, height)) for height, width in some] for some in batch]
        expected = processor(images=pictures, text=texts, add_special_tokens=False, padding=True, return_tensors="pt")
        for some, here, there, mask in zip(batch, ids, expected["input_ids"], expected["attention_mask"], strict=True):
            assert here == there[mask.bool()].tolist(), some
        # Where images have other numbers of tiles, the processor fills up with tiles of zeros; black is not 0.
        tiles_made = expected["pixel_values"].flatten(0, -4).flatten(1).any(1).sum()
        assert num_rows == tiles_made, batch


def _question_about(assets: Assets, count: int) -> tuple[str, Any]:
    """Return the text of a conversation about so many images, and its tokens."""
    turns = [Turn("user", "What?" + "\n<image>" * count), Turn("assistant", "This.")]
    return assets.chat.render(turns), assets.chat.text_tokens(turns, num_images=count)


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
    """Compare, bit for bit, the tiles of noise with those of the folder's processor, each image alone.

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
