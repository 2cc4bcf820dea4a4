"""The tokens of pictures of many sizes, compared with those of a folder's own processor."""

from __future__ import annotations

import itertools
from pathlib import Path

from PIL import Image
from transformers import AutoProcessor

from llava_mcore.data.encoding.assets import Assets
from llava_mcore.data.encoding.media import expand
from llava_mcore.data.samples import Turn
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import features_per_tile
from llava_mcore.models.media import Size


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
