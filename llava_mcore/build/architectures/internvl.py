"""InternVL: images are split into tiles, and four neighboring features become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    GotOcr2ImageProcessor,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PretrainedConfig,
)

from llava_mcore.build.architectures.base import FolderClass, tile_settings
from llava_mcore.build.language import IMAGE_TOKEN, VIDEO_TOKEN, TokenIds
from llava_mcore.build.vision import FeatureShape
from llava_mcore.models.architectures.registry import features_per_tile


class InternVlFolder(FolderClass):
    """InternVL: images are split into tiles, and four neighboring features become one."""

    model_class = InternVLForConditionalGeneration
    processor_class = InternVLProcessor
    connector = "pixel_shuffle"
    layers = (-1,)
    named_tokens: ClassVar[Mapping[str, str]] = {
        "context_image_token": IMAGE_TOKEN,
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": VIDEO_TOKEN,
    }

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole model, with the number of features per tile."""
        config = super().config(text, vision, plan, ids)
        config.image_seq_length = features_per_tile(config)
        return config

    def _config_fields(self, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds) -> dict[str, Any]:
        return {"image_token_id": ids.image}

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        how = tile_settings(image_processor, config)
        return dict(
            image_processor=GotOcr2ImageProcessor(**how),
            video_processor=InternVLVideoProcessor(**how),
            image_seq_length=config.image_seq_length,
        )
