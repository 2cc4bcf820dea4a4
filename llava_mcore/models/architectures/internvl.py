"""InternVL: images are split into tiles and a thumbnail, and squares of features become one feature.

Videos, which the class supports, are not trained on: a conversation has images only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import (
    BaseImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import IMAGE_FIELDS
from llava_mcore.media.media import MediaBudget, MediaPlan, MediaTokens, Picture, Processing, Size, image_tokens
from llava_mcore.models.architectures.base import TileArchitecture
from llava_mcore.models.architectures.llava import NAMES
from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.connectors.pixel_shuffle import PixelShuffle
from llava_mcore.models.vision.features import FeatureChoice, feature_choice, num_patches
from llava_mcore.weights.names import KnownNames

_MARKS = ("start_image_token", "end_image_token")
_DEFAULT_SEQ_LENGTH = 256
"""InternVLProcessor's image_seq_length."""


class InternVl(TileArchitecture):
    """InternVLForConditionalGeneration."""

    config_class = InternVLConfig
    model_class = InternVLForConditionalGeneration
    names: ClassVar[KnownNames] = NAMES
    towers = ("internvl_vision",)

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the pixel shuffle with its MLP, the only connector of the class."""
        return PixelShuffle()

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the features of vision_feature_layer and vision_feature_select_strategy.

        Raises:
            ConversionError: several layers, a class token among the features, or a norm after the last layer.
        """
        layer, vision = hf.vision_feature_layer, hf.vision_config
        if not isinstance(layer, int):
            raise ConversionError(f"vision_feature_layer = {layer}: InternVL reads one layer, give an integer")
        if hf.vision_feature_select_strategy != "default":
            raise ConversionError(
                f"vision_feature_select_strategy = {hf.vision_feature_select_strategy!r} leaves the class token among "
                "the features, which then do not form a square grid; InternVL needs 'default'"
            )
        if layer in (-1, vision.num_hidden_layers) and not vision.use_mean_pooling:
            raise ConversionError(
                "vision_config.use_mean_pooling = False adds a norm after the tower's last layer, which is not "
                f"supported for vision_feature_layer = {layer}; it must be True"
            )
        return feature_choice(hf)

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return the tiles into which the folder's image processor splits an image."""
        return _Tiles(hf.image_token_id, self.features_per_tile(hf), num_patches(hf.vision_config), processing)

    def placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the tokenizer's own name of the token."""
        return str(tokenizer.special_tokens_map.get("context_image_token", super().placeholder(tokenizer)))

    def processor_problems(self, hf: PretrainedConfig, settings: Mapping[str, Any]) -> list[str]:
        """Return why InternVLProcessor's number of tokens per tile differs from the model's number of features."""
        served, expected = settings.get("image_seq_length", _DEFAULT_SEQ_LENGTH), self.features_per_tile(hf)
        if served == expected:
            return []
        return [
            f"image_seq_length gives {served} tokens per tile, but the model's config.json gives {expected} features; "
            "correct the processor's settings"
        ]


class _Tiles(MediaPlan):
    """`<img>`, a placeholder per feature of all tiles, `</img>`, as InternVLProcessor writes them."""

    def __init__(
        self, image_token_id: int, features_per_tile: int, patches_per_tile: int, processing: Processing
    ) -> None:
        """Raises ConversionError for a tokenizer without the marks, or a processor without tiles of a fixed size."""
        self.image_token_id: int = image_token_id
        self.fields = IMAGE_FIELDS
        self.any_size, self.tokens_per_tile, self.patches_per_tile = True, features_per_tile, patches_per_tile
        self._start, self._end = _mark_ids(processing.tokenizer)
        images = processing.image_processor
        values = images.to_dict()
        if not {"min_patches", "max_patches"} <= values.keys() or not images.size.height:
            raise ConversionError(
                f"{type(images).__name__} does not split images into tiles like InternVL: it must have min_patches, "
                "max_patches "
                "and a size of height and width, as GotOcr2ImageProcessor has"
            )
        self._tile: Size = (images.size.height, images.size.width)
        self._fewest, self._most_tiles = int(images.min_patches), int(images.max_patches)

    def pixels(
        self, processor: BaseImageProcessor, images: Sequence[Picture], tokens: Sequence[MediaTokens], **options: Any
    ) -> Tensor:
        """Return the tiles of images; the class's processor always splits images, whatever the image processor's
        default."""
        return super().pixels(processor, images, tokens, crop_to_patches=True, **options)

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the tokens of a conversation's images."""
        return [self._tokens(self._num_tiles(size)) for size in sizes]

    @property
    def smallest(self) -> MediaBudget:
        """The fewest tiles."""
        return self._budget(self._fewest)

    @property
    def largest(self) -> MediaBudget:
        """The most tiles."""
        return self._budget(self._most_tiles)

    def _budget(self, num_tiles: int) -> MediaBudget:
        """Several tiles have a thumbnail."""
        item = self._tokens(num_tiles + int(num_tiles > 1))
        return MediaBudget(len(item), item.num_patches)

    def _num_tiles(self, size: Size) -> int:
        """Return the number of tiles of an image, including a thumbnail if there are several."""
        columns, rows = get_optimal_tiled_canvas(size, self._tile, self._fewest, self._most_tiles)
        return columns * rows + int(columns * rows > 1)

    def _tokens(self, num_tiles: int) -> MediaTokens:
        placeholders = [self.image_token_id] * (num_tiles * self.tokens_per_tile)
        return image_tokens(
            [self._start, *placeholders, self._end],
            self.image_token_id,
            num_tiles=num_tiles,
            num_patches=num_tiles * self.patches_per_tile,
        )


def _mark_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    names = tokenizer.special_tokens_map
    missing = [name for name in _MARKS if name not in names]
    if missing:
        raise ConversionError(
            f"the tokenizer has no {' and no '.join(missing)}; InternVL's has them in extra_special_tokens in "
            "tokenizer_config.json"
        )
    return [int(tokenizer.convert_tokens_to_ids(names[name])) for name in _MARKS]
