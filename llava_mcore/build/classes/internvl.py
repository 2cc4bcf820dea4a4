"""InternVL: pictures are cut into tiles, of which four neighboring features become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from llava_mcore.build.classes.base import FolderClass, tile_settings
from llava_mcore.build.language import IMAGE_TOKEN, VIDEO_TOKEN, TokenIds
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.models.architectures.registry import ARCHITECTURES


class InternVlFolder(FolderClass):
    """InternVL: pictures are cut into tiles, of which four neighboring features become one."""

    model_class = InternVLForConditionalGeneration
    connector = "pixel_shuffle"
    layers = (-1,)
    named_tokens: ClassVar[Mapping[str, str]] = {
        "context_image_token": IMAGE_TOKEN,
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": VIDEO_TOKEN,
    }

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole."""
        config = InternVLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=ids.image,
            vision_feature_layer=plan.config_value,
            vision_feature_select_strategy=plan.strategy,
            tie_word_embeddings=text.tie_word_embeddings,
        )
        config.image_seq_length = ARCHITECTURES[config.model_type].features_per_tile(config)
        return config

    def processor(
        self,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        plan: FeaturePlan,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor; tiles are resized and normalized as the source's pictures are."""
        how = tile_settings(image_processor, config)
        return InternVLProcessor(
            image_processor=GotOcr2ImageProcessor(**how),
            tokenizer=tokenizer,
            video_processor=InternVLVideoProcessor(**how),
            image_seq_length=config.image_seq_length,
            chat_template=template,
        )
