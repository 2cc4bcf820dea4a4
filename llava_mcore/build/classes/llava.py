"""LLaVA-1.5: every picture is one tile."""

from __future__ import annotations

from typing import Any

from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from llava_mcore.build.classes.base import FolderClass
from llava_mcore.build.language import IMAGE_TOKEN, TokenIds
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.models.vision.geometry import patch_side


class LlavaFolder(FolderClass):
    """LLaVA-1.5: every picture is one tile."""

    model_class = LlavaForConditionalGeneration
    connector = "mlp"
    tile = "picture"
    layers = (-2,)

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole."""
        return LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=ids.image,
            image_seq_length=plan.tokens,
            vision_feature_layer=plan.config_value,
            vision_feature_select_strategy=plan.strategy,
            tie_word_embeddings=text.tie_word_embeddings,
        )

    def processor(
        self,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        plan: FeaturePlan,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor; the image processor is the source's."""
        return LlavaProcessor(
            image_processor=image_processor,
            tokenizer=tokenizer,
            patch_size=patch_side(config.vision_config),
            vision_feature_select_strategy=plan.strategy,
            num_additional_image_tokens=plan.class_tokens,
            image_token=IMAGE_TOKEN,
            chat_template=template,
        )
