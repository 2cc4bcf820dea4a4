"""A complete, tiny, random folder of Mllama, and conversations for it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, MllamaForConditionalGeneration

from llava_mcore.build.tiny.classes import write_tiny
from llava_mcore.convert.inputs import processed_media
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.models.architectures.hf_config import load_hf_config

SIZES = ((28, 28), (30, 90), (200, 31), (60, 50), (9, 400))
"""Height and width, of one to four tiles."""


def make_hf_mllama(folder: Path) -> MllamaForConditionalGeneration:
    """Write a whole folder (2 x 2 patches, 4 tiles; 2 of 4 layers attend to images) and return the model."""
    write_tiny("mllama", folder, 0)
    return MllamaForConditionalGeneration.from_pretrained(folder).eval()


def image(height: int, width: int, seed: int = 0) -> bytes:
    """Return a PNG of noise."""
    buffer = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def conversation(text: str, *sizes: tuple[int, int]) -> Conversation:
    """Return a question about images of these sizes, and an answer."""
    images = [image(*size, seed=i) for i, size in enumerate(sizes)]
    return Conversation([Turn("user", text), Turn("assistant", "This is it.")], images=images)


CONVERSATIONS = (
    conversation("What is this?\n<image>Is it red?", SIZES[1]),
    conversation("No image."),
    conversation("<image><image>Both<image>and one more", *SIZES[:3]),
    conversation("A question, then <image>", SIZES[3]),
)


def theirs_of(folder: Path, conversation: Conversation) -> Any:
    """Return what the folder's own processor makes of a conversation."""
    processor = AutoProcessor.from_pretrained(folder)
    text = load_assets(folder).chat.render(conversation.turns)
    images = [Image.open(BytesIO(data)) for data in conversation.images]
    return processor(images=images or None, text=text, add_special_tokens=False, return_tensors="pt")


def attended_inputs(folder: Path) -> dict[str, Tensor]:
    """Return a conversation with images of one to three tiles, for both models.

    It is alone: in a batch, transformers lets tokens before the first image read padding of the others.
    """
    theirs = theirs_of(folder, CONVERSATIONS[2])
    processor = AutoProcessor.from_pretrained(folder)
    media, positions = processed_media(load_hf_config(folder), processor, theirs, [SIZES[:3]])
    ours = {"input_ids": theirs.pop("input_ids"), "position_ids": positions, **media}
    return ours | {f"hugging face: {name}": x for name, x in theirs.items() if name != "attention_mask"}
