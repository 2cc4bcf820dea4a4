"""The Hugging Face class of a built folder, which its connector decides: one kind each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from llava_mcore.build.language import IMAGE_TOKEN
from llava_mcore.build.options import CONNECTORS, BuildOptions
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.registry import ARCHITECTURES
from llava_mcore.models.vision.geometry import image_side, patch_side
from llava_mcore.models.vision.registry import towers_of_any_class


class FolderClass(ABC):
    """A class with its configuration and its processor."""

    model_class: ClassVar[type[PreTrainedModel]]
    layers: ClassVar[tuple[int, ...]]
    """vision_feature_layer, where none is asked for."""
    named_tokens: ClassVar[Mapping[str, str]] = {}
    """Tokens that the tokenizer has under names which the class's processor asks for; the placeholder among them."""

    def require_tower(self, vision: PretrainedConfig, options: BuildOptions) -> None:
        """Raise ConfigError for a tower that the class does not read."""
        towers = ARCHITECTURES[self.model_class.config_class.model_type].towers or towers_of_any_class()
        if vision.model_type not in towers:
            raise ConfigError(
                f"--connector {options.connector} makes an {self.model_class.__name__}, whose tower is "
                f"{' or '.join(towers)} in transformers; --vision-model {options.vision_model} is {vision.model_type!r}"
            )

    @abstractmethod
    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, image_token_id: int
    ) -> PretrainedConfig:
        """Return the configuration of the whole, around those of its parts."""

    @abstractmethod
    def processor(
        self,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        plan: FeaturePlan,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor. `image_processor`: the source's, for pictures of the tower's size."""


class LlavaFolder(FolderClass):
    """LLaVA-1.5: every picture is one tile."""

    model_class = LlavaForConditionalGeneration
    layers = (-2,)

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, image_token_id: int
    ) -> PretrainedConfig:
        """Return the configuration of the whole."""
        return LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=image_token_id,
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


class InternVlFolder(FolderClass):
    """InternVL: pictures are cut into tiles, of which four neighbouring features become one."""

    model_class = InternVLForConditionalGeneration
    layers = (-1,)
    named_tokens: ClassVar[Mapping[str, str]] = {
        "context_image_token": IMAGE_TOKEN,
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, image_token_id: int
    ) -> PretrainedConfig:
        """Return the configuration of the whole."""
        config = InternVLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=image_token_id,
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
        """Return the processor; tiles are resized and normalised as the source's pictures are."""
        side = image_side(config.vision_config)
        how = {
            "size": {"height": side, "width": side},
            "image_mean": list(image_processor.image_mean),
            "image_std": list(image_processor.image_std),
            "resample": image_processor.resample,
        }
        return InternVLProcessor(
            image_processor=GotOcr2ImageProcessor(**how),
            tokenizer=tokenizer,
            video_processor=InternVLVideoProcessor(**how),
            image_seq_length=config.image_seq_length,
            chat_template=template,
        )


_CLASSES: Mapping[str, FolderClass] = dict(zip(CONNECTORS, (LlavaFolder(), InternVlFolder()), strict=True))


def folder_class(options: BuildOptions) -> FolderClass:
    """Return the class of the folder. Raises ConfigError for a connector that no class has."""
    if options.connector not in _CLASSES:
        raise ConfigError(f"--connector {options.connector}: no class has it; choose one of {', '.join(CONNECTORS)}")
    return _CLASSES[options.connector]
