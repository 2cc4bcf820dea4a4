"""LLaVA-NeXT and LLaVA-OneVision: a base view and a grid of tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PretrainedConfig,
)

from llava_mcore.build.architectures.base import FolderClass, tile_settings
from llava_mcore.build.language import IMAGE_TOKEN, VIDEO_TOKEN, TokenIds
from llava_mcore.build.vision import FeatureShape
from llava_mcore.errors import ConfigError
from llava_mcore.models.vision.features import image_side, num_patches, patch_side

_ASPECT_RATIO = "anyres_max_9"
"""As in LLaVA-OneVision's own checkpoints: larger grids are resized to nine tiles."""


class GridFolder(FolderClass):
    """A base view and the grid that fits an image's proportions; the features of a tile form a square."""

    connector = "mlp"
    layers = (-2,)
    grids: ClassVar[tuple[tuple[int, int], ...]]
    """Rows and columns of tiles."""

    def pinpoints(self, vision: PretrainedConfig) -> list[list[int]]:
        """Return height and width of the grids in pixels."""
        side = image_side(vision)
        return [[rows * side, columns * side] for rows, columns in self.grids]

    def _require_square(self, vision: PretrainedConfig, plan: FeatureShape) -> None:
        """Raise ConfigError if features do not form a square, or the class does not support the tower in
        transformers."""
        if not isinstance(vision.image_size, int):
            raise ConfigError(
                f"--architecture {self.architecture}: {vision.model_type} has an image_size of height and width, but "
                "that class of transformers expects one number; take another tower or --architecture llava"
            )
        expected = num_patches(vision)
        if plan.tokens == expected:
            return
        advice = "take --vision-feature-select-strategy default"
        if plan.class_tokens > 1:
            advice = (
                f"{vision.model_type} has registers among them; take a tower without registers, or --architecture llava"
            )
        raise ConfigError(
            f"--architecture {self.architecture} needs the features of a tile as a square, but strategy "
            f"{plan.strategy} leaves {plan.tokens} features of {expected} patches: {advice}"
        )


class NextFolder(GridFolder):
    """LLaVA-NeXT: the grids of LLaVA-1.6."""

    model_class = LlavaNextForConditionalGeneration
    processor_class = LlavaNextProcessor
    grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))

    def _config_fields(self, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds) -> dict[str, Any]:
        self._require_square(vision, plan)
        return dict(
            image_token_index=ids.image,
            image_seq_length=plan.tokens,
            image_grid_pinpoints=self.pinpoints(vision),
        )

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        how = tile_settings(image_processor, config)
        side = image_side(config.vision_config)
        # The size in the format of the class's own checkpoints.
        how |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return dict(
            image_processor=LlavaNextImageProcessor(image_grid_pinpoints=config.image_grid_pinpoints, **how),
            patch_size=patch_side(config.vision_config),
            vision_feature_select_strategy=plan.strategy,
            num_additional_image_tokens=plan.class_tokens,
            image_token=IMAGE_TOKEN,
        )


class OnevisionFolder(GridFolder):
    """LLaVA-OneVision: large grids are resized, and videos are supported."""

    model_class = LlavaOnevisionForConditionalGeneration
    processor_class = LlavaOnevisionProcessor
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
    named_tokens: ClassVar[Mapping[str, str]] = {"image_token": IMAGE_TOKEN, "video_token": VIDEO_TOKEN}

    def _config_fields(self, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds) -> dict[str, Any]:
        self._require_square(vision, plan)
        return dict(
            image_token_index=ids.image,
            video_token_index=ids.video,
            image_grid_pinpoints=self.pinpoints(vision),
            vision_aspect_ratio=_ASPECT_RATIO,
        )

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        how = tile_settings(image_processor, config)
        return dict(
            image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=config.image_grid_pinpoints, **how),
            video_processor=LlavaOnevisionVideoProcessor(**how),
            # The processor subtracts the class token.
            num_image_tokens=plan.tokens + int(plan.strategy == "default"),
            vision_feature_select_strategy=plan.strategy,
            image_token=IMAGE_TOKEN,
            video_token=VIDEO_TOKEN,
            vision_aspect_ratio=config.vision_aspect_ratio,
        )
