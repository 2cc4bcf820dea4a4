"""Complete, tiny, random folders of Idefics2, with its own processor."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    Idefics2ImageProcessor,
    Idefics2Processor,
)

from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.tokens import expand
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.media.batch_fields import MEDIA_SEQLENS
from llava_mcore.media.media import Size
from tests.helpers.tiny_classes import without_type, write
from tests.helpers.tiny_hf import PATCH, make_tokenizer, text_config, vision_config

FAKE = "<fake_token_around_image>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role.capitalize() }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}<end_of_utterance>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""As that of the published models, except for the token that ends an answer."""
NAMED = {"image_token": "<image>", "image_boundary_token": FAKE}
LATENTS = 6
SHORTEST, LONGEST = 2 * PATCH + 3, 6 * PATCH + 5
"""Edges of images in pixels; a remainder of a patch is left over."""


def idefics2_processor(*, splits: bool = False, latents: int = LATENTS) -> Idefics2Processor:
    """The processor of `make_hf_idefics2`. `splits`: whether images are split into quarters."""
    size = {"shortest_edge": SHORTEST, "longest_edge": LONGEST}
    return Idefics2Processor(
        image_processor=Idefics2ImageProcessor(size=size, do_image_splitting=splits),
        tokenizer=make_tokenizer(named=NAMED, more=["<end_of_utterance>"]),
        image_seq_len=latents,
        chat_template=CHAT_TEMPLATE,
    )


def make_hf_idefics2(
    folder: Path,
    *,
    vision: str = "siglip",
    text: str = "mistral",
    tie: bool = False,
    seed: int = 0,
    splits: bool = False,
    vision_overrides: dict[str, Any] | None = None,
    text_overrides: dict[str, Any] | None = None,
) -> Idefics2ForConditionalGeneration:
    """Write a whole folder (a table of 5 x 5 positions; 6 latents, 4 heads in 2 groups) and return the model."""
    assert vision == "siglip", "the only tower of the class"
    processor = idefics2_processor(splits=splits)
    t = text_config(text, tie_word_embeddings=tie, **(text_overrides or {}))
    perceiver = {
        "hidden_size": t.hidden_size,
        "resampler_n_latents": LATENTS,
        "resampler_depth": 2,
        "resampler_n_heads": 4,
        "resampler_head_dim": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    }
    config = Idefics2Config(
        vision_config=without_type(vision_config(vision, image_size=5 * PATCH, **(vision_overrides or {}))),
        perceiver_config=perceiver,
        text_config=t,
        image_token_id=processor.tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=tie,
    )
    return write(Idefics2ForConditionalGeneration, config, processor, folder, seed)


def hf_pictures(folder: Path, pictures: Sequence[bytes]) -> dict[str, Tensor]:
    """Return all images of a batch as transformers' model takes them, padded to one size: those of one row.

    It does not use rows, only the order of the images.
    """
    images = AutoImageProcessor.from_pretrained(folder)
    return dict(images([[Image.fromarray(pixels_of(data)) for data in pictures]], return_tensors="pt"))


def pixels_of(picture: bytes) -> Any:
    """Return an image as an array [height, width, 3]."""
    return np.asarray(Image.open(BytesIO(picture)).convert("RGB"))


def theirs_of(folder: Path, conversation: Conversation) -> Any:
    """Return what the folder's own processor makes of a conversation, by its own chat template."""
    processor = AutoProcessor.from_pretrained(folder)
    text = load_assets(folder).chat.render(conversation.turns)
    pictures = [Image.fromarray(pixels_of(x)) for x in conversation.images]
    return processor(images=pictures or None, text=text, add_special_tokens=False, return_tensors="pt")


TEXTS = (
    *("<image> <image>\n<image>", "<image><image><image>"),
    *("a<image>b <image><image><", "What?\n<image>\n<image>! <image>"),
)
"""Of three images."""


def assert_the_processors_tokens(folder: Path, assets: Assets, sizes: Sequence[Size], patch: int = PATCH) -> None:
    """Compare ids, patches and their numbers with those of the folder's processor, three images at a time."""
    processor = AutoProcessor.from_pretrained(folder)
    parts = 5 if processor.image_processor.do_image_splitting else 1
    for number in range(0, len(sizes), 3):
        some = sizes[number : number + 3]
        turns = [Turn("user", TEXTS[number // 3 % len(TEXTS)]), Turn("assistant", "This.")]
        tokens = assets.plan.tokens(some)
        found = expand(assets.chat.text_tokens(turns, num_images=3), assets.plan.placeholders, tokens)
        pictures = [Image.new("RGB", (width, height)) for height, width in some]
        text = assets.chat.render(turns)
        expected = processor(images=pictures, text=text, add_special_tokens=False, return_tensors="pt")
        assert found.input_ids.tolist() == expected["input_ids"][0].tolist(), some
        masks = expected["pixel_attention_mask"][0]
        rows, columns = masks[:, :, 0].sum(1) // patch, masks[:, 0].sum(1) // patch
        lengths = np.concatenate([item.values[MEDIA_SEQLENS] for item in tokens])
        assert lengths.tolist() == (rows * columns).tolist(), some
        assert [item.num_features for item in tokens] == [parts * processor.image_seq_len] * 3
