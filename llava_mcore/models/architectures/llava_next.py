"""LLaVA-NeXT (1.6): an image is a base view and the tiles of the grid that fits its proportions."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration, PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.media.anyres import NEXT_FIELDS, AnyRes, AnyResPlan
from llava_mcore.media.batch_fields import Fields
from llava_mcore.media.media import MediaPlan, Processing
from llava_mcore.models.architectures.llava import NAMES, Llava
from llava_mcore.models.vision.features import image_side, num_patches, patch_side
from llava_mcore.weights.names import KnownNames


class LlavaNext(Llava):
    """LlavaNextForConditionalGeneration."""

    config_class = LlavaNextConfig
    model_class = LlavaNextForConditionalGeneration
    names: ClassVar[KnownNames] = replace(
        NAMES,
        newline=("model.image_newline", "image_newline"),
        styles=tuple(
            replace(style, newline="model.image_newline" if style.text.startswith("model.") else "image_newline")
            for style in NAMES.styles
        ),
    )

    fields: ClassVar[Fields] = NEXT_FIELDS

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return the plan of base view and grid.

        Raises:
            ConversionError: features do not form a square, or pinpoints are not multiples of the tower's size.
        """
        return AnyResPlan(hf.image_token_id, self.anyres(hf), self.fields)

    def anyres(self, hf: PretrainedConfig) -> AnyRes:
        """Return how images are split. Raises like `media`."""
        vision = hf.vision_config
        side, expected = image_side(vision), num_patches(vision)
        num_features = self.features_per_tile(hf)
        if num_features != expected:
            raise ConversionError(
                f"vision_feature_select_strategy = {hf.vision_feature_select_strategy!r} leaves {num_features} features"
                f" of a tile of {expected} patches, but {type(hf).__name__} lays them out as a square: take 'default' "
                "for a tower with a class token and 'full' for one without"
            )
        pinpoints = tuple((int(height), int(width)) for height, width in hf.image_grid_pinpoints)
        odd = [point for point in pinpoints if point[0] % side or point[1] % side]
        if odd or not pinpoints:
            raise ConversionError(
                f"image_grid_pinpoints: expected multiples of the tower's {side} pixels, found {odd or 'none'}"
            )
        return AnyRes(side, side // patch_side(vision), pinpoints)
