"""Complete, tiny, random folders of Idefics2, with its own processor."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    Idefics2ImageProcessor,
    Idefics2Processor,
)

from tests.helpers.tiny_classes import without_type, write
from tests.helpers.tiny_hf import PATCH, make_tokenizer, text_config, vision_config

FAKE = "<fake_token_around_image>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role.capitalize() }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}<end_of_utterance>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""As that of the published models, but for the token that ends an answer."""
NAMED = {"image_token": "<image>", "image_boundary_token": FAKE}
LATENTS = 6
SHORTEST, LONGEST = 2 * PATCH + 3, 6 * PATCH + 5
"""Edges of pictures in pixels; a remainder of a patch is left over."""


def idefics2_processor(*, splits: bool = False, latents: int = LATENTS) -> Idefics2Processor:
    """The processor of `make_hf_idefics2`. `splits`: whether pictures are split into quarters."""
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
    """Return all pictures of a batch as transformers' model takes them, padded to one size: those of one row.

    It looks at no rows, only at the order of the pictures.
    """
    images = AutoImageProcessor.from_pretrained(folder)
    return dict(images([[Image.open(BytesIO(data)) for data in pictures]], return_tensors="pt"))
