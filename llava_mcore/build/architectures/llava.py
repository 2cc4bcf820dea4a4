"""LLaVA-1.5: every image is one tile."""

from __future__ import annotations

from typing import Any

from transformers import (
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PretrainedConfig,
)

from llava_mcore.build.architectures.base import FolderClass
from llava_mcore.build.language import IMAGE_TOKEN, TokenIds
from llava_mcore.build.vision import FeatureShape
from llava_mcore.models.vision.features import patch_side


class LlavaFolder(FolderClass):
    """LLaVA-1.5: every image is one tile."""

    model_class = LlavaForConditionalGeneration
    processor_class = LlavaProcessor
    connector = "mlp"
    tile = "image"
    layers = (-2,)

    def _config_fields(self, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds) -> dict[str, Any]:
        return dict(
            image_token_index=ids.image,
            image_seq_length=plan.tokens,
        )

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        return dict(
            image_processor=image_processor,
            patch_size=patch_side(config.vision_config),
            vision_feature_select_strategy=plan.strategy,
            num_additional_image_tokens=plan.class_tokens,
            image_token=IMAGE_TOKEN,
        )
