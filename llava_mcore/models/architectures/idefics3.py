"""Idefics3 and SmolVLM: images are split into rows and columns of tiles, each with its mark, and one tile of the
whole image.

Videos are not supported: a conversation has images only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    BaseImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_idefics3 import get_resize_output_image_size

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import IMAGE_FIELDS
from llava_mcore.media.media import MediaBudget, MediaPlan, MediaTokens, Picture, Processing, Size, image_tokens
from llava_mcore.models.architectures.base import TileArchitecture
from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.connectors.shuffle_linear import ShuffleLinear
from llava_mcore.models.vision.features import FeatureChoice, image_side, num_patches
from llava_mcore.weights.names import HfNames, KnownNames

_STYLE = HfNames("model.vision_model.", "model.connector.", "model.text_model.", "lm_head.weight")
_DEFAULT_SEQ_LEN = 169
"""Both processors' image_seq_len."""


class Idefics3(TileArchitecture):
    """Idefics3ForConditionalGeneration."""

    config_class = Idefics3Config
    model_class = Idefics3ForConditionalGeneration
    names: ClassVar[KnownNames] = KnownNames.single(_STYLE)
    towers = ("idefics3_vision", "idefics3")

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the pixel shuffle with its matrix, the only connector of the class."""
        return ShuffleLinear()

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the last layer's output, all of whose positions are patches."""
        return FeatureChoice((hf.vision_config.num_hidden_layers,), drop_first_token=False)

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return the rows and columns into which the folder's image processor splits an image."""
        vision = hf.vision_config
        return _Grid(hf.image_token_id, self.features_per_tile(hf), num_patches(vision), image_side(vision), processing)

    def processor_problems(self, hf: PretrainedConfig, settings: Mapping[str, Any]) -> list[str]:
        """Return why the processor's number of tokens per tile differs from the model's number of features."""
        served, expected = settings.get("image_seq_len", _DEFAULT_SEQ_LEN), self.features_per_tile(hf)
        if served == expected:
            return []
        return [
            f"image_seq_len gives {served} tokens per tile, but the model's config.json gives {expected} features;  "
            "correct the processor's settings"
        ]


class SmolVlm(Idefics3):
    """SmolVLMForConditionalGeneration."""

    config_class = SmolVLMConfig
    model_class = SmolVLMForConditionalGeneration
    towers = ("smolvlm_vision", "smolvlm")


class _Grid(MediaPlan):
    """`<fake_token_around_image>`, the tile's mark and its placeholders, for each tile, as the processors write
    them."""

    def __init__(
        self,
        image_token_id: int,
        features_per_tile: int,
        patches_per_tile: int,
        side: int,
        processing: Processing,
    ) -> None:
        """side: of a tile as the tower takes it.

        Raises:
            ConversionError: the tokenizer lacks the marks, or tiles of the processor do not have the tower's size.
        """
        self.image_token_id: int = image_token_id
        self.fields = IMAGE_FIELDS
        self.any_size, self.tokens_per_tile, self._side = True, features_per_tile, side
        self.patches_per_tile = patches_per_tile
        # What the processor does with sizes, which the plan repeats.
        _check_settings(processing.image_processor, side)
        self._splits = bool(processing.image_processor.do_image_splitting)
        self._longest = int(processing.image_processor.size.longest_edge)
        # The marks that the processor writes around tiles.
        tokenizer = processing.tokenizer
        named = tokenizer.special_tokens_map
        self._image = str(tokenizer.convert_ids_to_tokens(image_token_id))
        self._fake = str(named.get("fake_image_token", "<fake_token_around_image>"))
        self._global = str(named.get("global_image_token", "<global-img>"))
        _check_marks(tokenizer, self._fake)
        # Tokenized alone they give the same tokens as in a text: special tokens at both ends separate them from it.
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._known: dict[Size, MediaTokens] = {}

    def pixels(
        self, processor: BaseImageProcessor, images: Sequence[Picture], tokens: Sequence[MediaTokens], **options: Any
    ) -> Tensor:
        """Return the tiles of images. They have one size, and padding would make them float32."""
        processed = processor(images=[list(images)], do_pad=False, return_tensors="pt", **options)
        return processed["pixel_values"].flatten(0, 1)

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the tokens of a conversation's images."""
        return [self._tokens(*self._rows_and_columns(size)) for size in sizes]

    @property
    def smallest(self) -> MediaBudget:
        """A long, narrow image: its longest edge is enlarged to as many tiles as that of any other."""
        return self._budget(1, self._longest)

    @property
    def largest(self) -> MediaBudget:
        """A square image."""
        return self._budget(self._longest, self._longest)

    def _budget(self, height: int, width: int) -> MediaBudget:
        (item,) = self.tokens([(height, width)])
        return MediaBudget(len(item), item.num_patches)

    def _rows_and_columns(self, size: Size) -> Size:
        """Return rows and columns of tiles, 0 and 0 for a single tile (`resize_for_vision_encoder`)."""
        if not self._splits:
            return 0, 0
        shape = torch.empty(size, device="meta")  # of which only the shape is read
        height, width = get_resize_output_image_size(shape, resolution_max_side=self._longest)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self._side)
            rows = math.ceil(int(columns * self._side / ratio) / self._side)
        else:
            rows = math.ceil(height / self._side)
            columns = math.ceil(int(rows * self._side * ratio) / self._side)
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)

    def _tokens(self, rows: int, columns: int) -> MediaTokens:
        if (rows, columns) not in self._known:
            ids = self._encoder.encode(self._text(rows, columns), add_special_tokens=False).ids
            self._known[rows, columns] = image_tokens(
                ids,
                self.image_token_id,
                num_tiles=rows * columns + 1,
                num_patches=(rows * columns + 1) * self.patches_per_tile,
            )
        return self._known[rows, columns]

    def _text(self, rows: int, columns: int) -> str:
        """Return the same text as Idefics3Processor.replace_image_token and SmolVLMProcessor's."""
        placeholders = self._image * self.tokens_per_tile
        lines = [
            "".join(f"{self._fake}<row_{i + 1}_col_{j + 1}>{placeholders}" for j in range(columns)) + "\n"
            for i in range(rows)
        ]
        global_view = f"{self._fake}{self._global}{placeholders}{self._fake}"
        return "".join(lines) + "\n" * bool(rows) + global_view


def _check_settings(images: BaseImageProcessor, side: int) -> None:
    """Refuse settings with tiles of other sizes: the tower's positions are those of its own grid."""
    values = images.to_dict()
    missing = {"do_image_splitting", "max_image_size"} - values.keys()
    if missing:
        raise ConversionError(
            f"{type(images).__name__} has no {' and no '.join(sorted(missing))}; Idefics3's and SmolVLM's cut images "
            "into tiles by them"
        )
    if images.max_image_size["longest_edge"] != side:
        raise ConversionError(
            f"max_image_size.longest_edge = {images.max_image_size['longest_edge']} is the side of the tiles, but the "
            f"tower takes {side} x {side}; correct the image processor's settings"
        )
    if not images.do_resize or not images.size.longest_edge or images.size.longest_edge < 1:
        raise ConversionError(
            "the image processor must have do_resize = true and a size of longest_edge, by which images become a "
            "whole number of tiles"
        )


def _check_marks(tokenizer: PreTrainedTokenizerBase, fake: str) -> None:
    if fake not in tokenizer.get_vocab():
        raise ConversionError(
            f"the tokenizer has no {fake}, which surrounds the images of Idefics3 and SmolVLM; add it as a "
            "special token"
        )
