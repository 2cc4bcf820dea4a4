"""Converts the output of a Hugging Face processor into inputs of our model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, ProcessorMixin

from llava_mcore.batch_fields import PIXEL_SCALE, PIXEL_VALUES
from llava_mcore.errors import ConversionError
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.media import MediaTokens, Processing, Size, index_values
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.vision.geometry import image_side
from llava_mcore.pixels import NO_SCALE


def model_inputs(
    model: VisionLanguageModel, processor: ProcessorMixin, inputs: Mapping[str, Tensor], sizes: Sequence[Sequence[Size]]
) -> dict[str, Tensor | dict[str, Tensor]]:
    """Return the arguments of a forward pass for the output of the folder's own processor.

    Args:
        processor: the processor of the Hugging Face folder.
        inputs: its output, with input_ids [b, s].
        sizes: height and width in pixels of the pictures of each row.

    Raises:
        ConversionError: a picture is not expanded to the tokens that the model expects.
    """
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    media = processed_media(model.hf, processor, inputs, sizes)
    return {"input_ids": ids, "position_ids": positions, "media": media}


def processed_media(
    hf: PretrainedConfig, processor: ProcessorMixin, inputs: Mapping[str, Tensor], sizes: Sequence[Sequence[Size]]
) -> dict[str, Tensor]:
    """Return the media of a forward pass: the architecture's fields. Arguments and errors: see `model_inputs`."""
    plan = architecture_of(hf).media(hf, Processing(processor.tokenizer, processor.image_processor, {}))
    tokens = [plan.tokens(row) for row in sizes]
    rows = inputs["input_ids"].numpy()
    starts = [
        number * rows.shape[1] + start
        for number, (row, items) in enumerate(zip(rows, tokens, strict=True))
        for start in _starts(row, items)
    ]
    items = [item for row in tokens for item in row]
    own = {PIXEL_VALUES: _tiles(inputs, tokens, image_side(hf.vision_config)), PIXEL_SCALE: NO_SCALE}
    return own | index_values(plan.fields, items, starts)


def _starts(ids: NDArray[np.int64], items: Sequence[MediaTokens]) -> Iterator[int]:
    """Yield the position at which each picture's tokens start in a row."""
    start = 0
    for number, item in enumerate(items):
        last = len(ids) - len(item)
        while start <= last and not np.array_equal(ids[start : start + len(item)], item.ids):
            start += 1
        if start > last:
            raise ConversionError(
                f"picture {number} is not expanded to the {len(item)} tokens that the model's config.json makes of its "
                "size; correct the processor's settings"
            )
        yield start
        start += len(item)


def _tiles(inputs: Mapping[str, Tensor], rows: Sequence[Sequence[MediaTokens]], side: int) -> Tensor:
    """Return the tiles [tiles, 3, side, side] of pictures.

    Some processors pad every picture to the same number of tiles, some every row.
    """
    numbers = [item.num_tiles for row in rows for item in row]
    if not numbers:
        return torch.empty(0, 3, side, side)
    pixels = inputs["pixel_values"]
    if pixels.ndim == 4:
        return pixels
    if len(pixels) != len(numbers):
        numbers = [sum(item.num_tiles for item in row) for row in rows]
    return torch.cat([tiles[:number] for tiles, number in zip(pixels, numbers, strict=True)])
