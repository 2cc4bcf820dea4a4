"""Idefics2: images keep their proportions, and each becomes as many tokens as the connector has latents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import (
    BaseImageProcessor,
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    Idefics2ImageProcessor,
    Idefics2ImageProcessorPil,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.idefics2.image_processing_idefics2 import get_resize_output_image_size

from llava_mcore.errors import ConversionError, DataError
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, MEDIA_SEQLENS, POSITION_ROWS, Fields, MediaWork
from llava_mcore.media.media import AroundMedia, MediaBudget, MediaPlan, MediaTokens, Picture, Processing, Size
from llava_mcore.models.architectures.base import Architecture
from llava_mcore.models.connectors.perceiver import Perceiver
from llava_mcore.models.vision.families.idefics import Idefics2Siglip, position_rows
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.models.vision.features import FeatureChoice, patch_side
from llava_mcore.weights.names import HfNames, KnownNames

_STYLE = HfNames("model.vision_model.", "model.connector.", "model.text_model.", "lm_head.weight")
_DEFAULT_SEQ_LEN = 64
"""The processor's image_seq_len."""
_NUM_PARTS = 5
"""Parts of an image that is split: its quarters and the whole."""
_FAKE = "<fake_token_around_image>"
"""The processor's name of what surrounds an image, unless the tokenizer has one."""


class Idefics2(Architecture):
    """Idefics2ForConditionalGeneration."""

    config_class = Idefics2Config
    model_class = Idefics2ForConditionalGeneration
    names: ClassVar[KnownNames] = KnownNames.single(_STYLE)
    fields: ClassVar[Fields] = Idefics2Siglip.fields
    towers = Idefics2Siglip.model_types
    pads_images = True

    def connector(self, hf: PretrainedConfig) -> Perceiver:
        """Return the perceiver, the only connector of the class."""
        return Perceiver()

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the last layer's output, all of whose positions are patches."""
        return FeatureChoice((hf.vision_config.num_hidden_layers,), drop_first_token=False)

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return the patches of images of the sizes that the folder's image processor gives them."""
        return _ImagePlan(hf, processing)

    def pixel_shape(self, hf: PretrainedConfig) -> tuple[int, ...]:
        """Return the number of values in a flattened patch, as a shape."""
        return (vision_family(hf.vision_config).patch_dim(hf.vision_config),)

    def connector_products(self, hf: PretrainedConfig, work: MediaWork) -> list[int]:
        """Return the FLOPs of the perceiver's products with weights."""
        width = hf.vision_config.hidden_size
        return self.connector(hf).products(
            hf, input_size=width, num_features=work.num_patches, num_images=work.num_sequences
        )

    def connector_attention(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return the FLOPs of the latents' attention."""
        return self.connector(hf).attention(hf, num_features=work.num_patches, num_images=work.num_sequences)

    def connector_rows(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return how many features the perceiver reads."""
        return work.num_patches

    def processor_problems(self, hf: PretrainedConfig, settings: Mapping[str, Any]) -> list[str]:
        """Return why the processor's number of tokens per image differs from the number of latents."""
        served, expected = settings.get("image_seq_len", _DEFAULT_SEQ_LEN), hf.perceiver_config.resampler_n_latents
        if served == expected:
            return []
        return [
            f"image_seq_len gives {served} tokens per image, but the model's config.json has {expected} latents "
            "(perceiver_config.resampler_n_latents); correct the processor's settings"
        ]


class _ImagePlan(MediaPlan):
    """Images as packed patches, one or, if they are split, five per image of the data.

    `<fake_token_around_image>` is text, so that images that follow each other share one, as the processor writes it.
    Between the parts of an image it belongs to the image's tokens.
    """

    any_size = True

    def __init__(self, hf: PretrainedConfig, processing: Processing) -> None:
        """Raises ConversionError for an image processor or a tokenizer that is not Idefics2's."""
        images, tokenizer, vision = processing.image_processor, processing.tokenizer, hf.vision_config
        self.image_token_id, self.fields = hf.image_token_id, Idefics2Siglip.fields
        self._vision, self._side = vision, patch_side(vision)
        shortest, longest = _edges(images, self._side)
        self._splits, self._size = bool(images.do_image_splitting), images.size
        self._parts = _NUM_PARTS if self._splits else 1
        latents = hf.perceiver_config.resampler_n_latents
        self.tokens_per_tile = self._parts * latents
        self.patches_per_tile = self._parts * (shortest // self._side) ** 2
        self.rows_per_tile = self._parts * (longest // self._side) ** 2
        image, fake = _marks(tokenizer, hf.image_token_id)
        self.around_media = _around_media(image, fake)
        part, between = [hf.image_token_id] * latents, [tokenizer.convert_tokens_to_ids(fake)]
        ids = part + (between + part) * (self._parts - 1)
        self._ids = np.asarray(ids, dtype=np.int64)
        self._places = np.flatnonzero(self._ids == hf.image_token_id)

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the tokens of a conversation's images. DataError for one that is too small to be split."""
        return [self._tokens([self._grid(part) for part in self._parts_of(size)]) for size in sizes]

    @property
    def smallest(self) -> MediaBudget:
        """Every image has the same tokens."""
        return MediaBudget(len(self._ids), self.patches_per_tile)

    @property
    def largest(self) -> MediaBudget:
        """Every part with the longest edges."""
        return MediaBudget(len(self._ids), self.rows_per_tile)

    def _parts_of(self, size: Size) -> list[Size]:
        """Return the heights and widths of what the processor resizes: quarters and the whole, or the whole."""
        height, width = size
        if not self._splits:
            return [size]
        if min(size) < 2:
            raise DataError(f"an image of {width} x {height} pixels cannot be split into quarters")
        top, left = height // 2, width // 2
        return [(top, left), (top, width - left), (height - top, left), (height - top, width - left), size]

    def _grid(self, part: Size) -> Size:
        """Return rows and columns of patches; a remainder at the lower and right edge is ignored."""
        height, width = part
        if self._size.shortest_edge:
            shape = torch.empty(1, height, width, device="meta")  # only its shape is read
            height, width = get_resize_output_image_size(shape, self._size)
        else:
            height, width = self._size.height, self._size.width
        return height // self._side, width // self._side

    def _tokens(self, grids: Sequence[Size]) -> MediaTokens:
        counts = [rows * columns for rows, columns in grids]
        return MediaTokens(
            ids=self._ids,
            num_rows=sum(counts),
            num_patches=sum(counts),
            num_features=len(self._places),
            values={
                FEATURE_POSITIONS: self._places,
                MEDIA_SEQLENS: np.asarray(counts, dtype=np.int32),
                POSITION_ROWS: np.concatenate([position_rows(self._vision, *grid).numpy() for grid in grids]),
            },
        )

    def pixels(
        self, processor: BaseImageProcessor, images: Sequence[Picture], tokens: Sequence[MediaTokens], **options: Any
    ) -> Tensor:
        """Return the patches [patches, f] of images, each as large as it is: padding would make them float32."""
        processed = processor(images=[list(images)], do_pad=False, **options)["pixel_values"][0]
        return torch.cat([_patches(torch.as_tensor(part), self._side) for part in processed])

    def processed_pixels(
        self, processed: Mapping[str, Tensor], rows: Sequence[Sequence[MediaTokens]], row_shape: tuple[int, ...]
    ) -> Tensor:
        """Return the patches [patches, f] in the output of the folder's own processor, which pads images and rows."""
        images, masks = processed["pixel_values"].flatten(0, 1), processed["pixel_attention_mask"].flatten(0, 1)
        heights, widths = masks[:, :, 0].sum(1).tolist(), masks[:, 0].sum(1).tolist()
        padded_images = zip(images, map(int, heights), map(int, widths), strict=True)
        return torch.cat([_patches(x[:, :height, :width], self._side) for x, height, width in padded_images if height])


def _patches(image: Tensor, side: int) -> Tensor:
    """Return the patches [rows * columns, 3 * side * side] of an image [3, height, width], as convolutions see it."""
    rows, columns = (length // side for length in image.shape[1:])
    by_patch = image[:, : rows * side, : columns * side].reshape(3, rows, side, columns, side)
    return by_patch.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)


def _edges(images: BaseImageProcessor, side: int) -> Size:
    """Return the lengths in pixels between which the edges of images are. `side`: of a patch.

    Raises:
        ConversionError: another class's processor, or one that leaves images too small for a patch.
    """
    if not isinstance(images, Idefics2ImageProcessor | Idefics2ImageProcessorPil):
        raise ConversionError(f"the image processor is {type(images).__name__}; Idefics2 has an Idefics2ImageProcessor")
    size = images.size
    edges = (size.shortest_edge, size.longest_edge) if size.shortest_edge else (size.height, size.width)
    if not images.do_resize or not all(edges) or min(edges) < side:
        raise ConversionError(
            f"the image processor has do_resize = {images.do_resize} and size = {dict(size)}; it must resize images "
            f"to edges from shortest_edge to longest_edge, or to a height and a width, of at least a patch ({side} px)"
        )
    return min(edges), max(edges)


def _marks(tokenizer: PreTrainedTokenizerBase, image_token_id: int) -> tuple[str, str]:
    """Return an image's placeholder and what surrounds it, as Idefics2Processor finds them.

    Raises:
        ConversionError: the tokenizer lacks the second, or the names would be tokenized with spaces between them.
    """
    named, image = tokenizer.special_tokens_map, str(tokenizer.convert_ids_to_tokens(image_token_id))
    if "image_token" in named and "image_boundary_token" not in named:
        raise ConversionError(
            "the tokenizer names its image_token but no image_boundary_token, which Idefics2's processor then asks "
            "for; name both or none"
        )
    fake = str(named.get("image_boundary_token", _FAKE)) if "image_token" in named else _FAKE
    if fake not in tokenizer.get_vocab():
        raise ConversionError(
            f"the tokenizer has no {fake}, which surrounds Idefics2's images; add it as a special token"
        )
    if not image.startswith("<"):
        raise ConversionError(
            f"the placeholder of an image is {image!r}; Idefics2's processor needs one that begins with <"
        )
    return image, fake


def _around_media(image: str, fake: str) -> AroundMedia:
    """Return what Idefics2Processor replaces: it surrounds images, lets neighbors share a mark, and sets a space
    between a mark and a word."""
    mark = re.escape(fake)
    return AroundMedia(
        rules=((re.escape(image), f"{fake}{image}{fake}"), (mark + mark, fake), (rf"{mark}(?=[^\s<])", f"{fake} ")),
        marks=(fake,),
    )
