"""The Hugging Face class of a built folder: its configuration, its tokens, its processor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from transformers import (
    BaseImageProcessor,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from llava_mcore.build.language import IMAGE_TOKEN, VIDEO_TOKEN, TokenIds
from llava_mcore.build.options import Architecture
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.errors import ConfigError
from llava_mcore.models.vision.geometry import image_side, num_patches, patch_side

ASPECT_RATIO = "anyres_max_9"
"""Of LLaVA-OneVision's own checkpoints: larger grids are resized to nine tiles."""
_PIXEL_SETTINGS = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""What a class's image processor takes over from the tower's own."""


class FolderClass(ABC):
    """A class with its configuration and its processor."""

    model_class: ClassVar[type[PreTrainedModel]]
    media_tokens: ClassVar[tuple[str, ...]] = (IMAGE_TOKEN,)
    """The placeholders that the tokenizer needs."""
    grids: ClassVar[tuple[tuple[int, int], ...]] = ()
    """Rows and columns of tiles that a picture may be cut into; none: it stays whole."""

    def pinpoints(self, vision: PreTrainedConfig) -> list[list[int]]:
        """Return height and width of the grids in pixels."""
        side = image_side(vision)
        return [[rows * side, columns * side] for rows, columns in self.grids]

    def config(
        self, text: PreTrainedConfig, vision: PreTrainedConfig, plan: FeaturePlan, ids: TokenIds
    ) -> PreTrainedConfig:
        """Return the configuration of the whole, around those of its parts."""
        return self.model_class.config_class(
            text_config=text,
            vision_config=vision,
            image_token_index=ids.image,
            vision_feature_layer=plan.config_value,
            vision_feature_select_strategy=plan.strategy,
            # transformers ties by the top-level value, Megatron and older readers look into text_config.
            tie_word_embeddings=text.tie_word_embeddings,
            **self.own_fields(vision, plan, ids),
        )

    @abstractmethod
    def own_fields(self, vision: PreTrainedConfig, plan: FeaturePlan, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of config.json that not every class has."""

    @abstractmethod
    def processor(
        self,
        images: BaseImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        vision: PreTrainedConfig,
        plan: FeaturePlan,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor. `images`: the source's, for pictures of the tower's size."""


class LlavaFolder(FolderClass):
    """LLaVA-1.5: every picture is one tile."""

    model_class = LlavaForConditionalGeneration

    def own_fields(self, vision: PreTrainedConfig, plan: FeaturePlan, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of config.json that not every class has."""
        return {"image_seq_length": plan.tokens}

    def processor(
        self,
        images: BaseImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        vision: PreTrainedConfig,
        plan: FeaturePlan,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor; the image processor is the source's."""
        return LlavaProcessor(
            image_processor=images,
            tokenizer=tokenizer,
            patch_size=patch_side(vision),
            vision_feature_select_strategy=plan.strategy,
            num_additional_image_tokens=plan.class_tokens,
            image_token=IMAGE_TOKEN,
            chat_template=template,
        )


class NextFolder(FolderClass):
    """LLaVA-NeXT: a base view and a grid, as LLaVA-1.6 has them."""

    model_class = LlavaNextForConditionalGeneration
    grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))

    def own_fields(self, vision: PreTrainedConfig, plan: FeaturePlan, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of config.json that not every class has."""
        return {"image_seq_length": plan.tokens, "image_grid_pinpoints": self.pinpoints(vision)}

    def processor(
        self,
        images: BaseImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        vision: PreTrainedConfig,
        plan: FeaturePlan,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor; tiles are resized and normalised as the source's pictures are."""
        side = image_side(vision)
        return LlavaNextProcessor(
            image_processor=LlavaNextImageProcessor(
                size={"shortest_edge": side},
                crop_size={"height": side, "width": side},
                image_grid_pinpoints=self.pinpoints(vision),
                **_pixel_settings(images),
            ),
            tokenizer=tokenizer,
            patch_size=patch_side(vision),
            vision_feature_select_strategy=plan.strategy,
            num_additional_image_tokens=plan.class_tokens,
            image_token=IMAGE_TOKEN,
            chat_template=template,
        )


class OnevisionFolder(FolderClass):
    """LLaVA-OneVision: large grids are resized, and there are videos."""

    model_class = LlavaOnevisionForConditionalGeneration
    media_tokens = (IMAGE_TOKEN, VIDEO_TOKEN)
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))

    def own_fields(self, vision: PreTrainedConfig, plan: FeaturePlan, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of config.json that not every class has."""
        return {
            "image_grid_pinpoints": self.pinpoints(vision),
            "vision_aspect_ratio": ASPECT_RATIO,
            "video_token_index": ids.video,
        }

    def processor(
        self,
        images: BaseImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        vision: PreTrainedConfig,
        plan: FeaturePlan,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor; tiles and frames are resized and normalised as the source's pictures are."""
        side = image_side(vision)
        how = _pixel_settings(images) | {"size": {"height": side, "width": side}}
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=self.pinpoints(vision), **how),
            tokenizer=tokenizer,
            video_processor=LlavaOnevisionVideoProcessor(**how),
            # The processor takes the class token off again.
            num_image_tokens=plan.tokens + int(plan.strategy == "default"),
            vision_feature_select_strategy=plan.strategy,
            image_token=IMAGE_TOKEN,
            video_token=VIDEO_TOKEN,
            vision_aspect_ratio=ASPECT_RATIO,
            chat_template=template,
        )


_CLASSES: dict[Architecture, FolderClass] = {
    "llava": LlavaFolder(),
    "llava_next": NextFolder(),
    "llava_onevision": OnevisionFolder(),
}


def folder_class(architecture: Architecture, vision: PreTrainedConfig, plan: FeaturePlan) -> FolderClass:
    """Return the class of the folder.

    Raises:
        ConfigError: it takes features as a square, and the tower's are none; or transformers cannot read the tower.
    """
    kind = _CLASSES[architecture]
    if kind.grids:
        _require_square(architecture, vision, plan)
    return kind


def _require_square(architecture: Architecture, vision: PreTrainedConfig, plan: FeaturePlan) -> None:
    if not isinstance(vision.image_size, int):
        raise ConfigError(
            f"--architecture {architecture}: {vision.model_type} writes image_size as height and width, of which that "
            "class of transformers expects one number; take another tower, or --architecture llava"
        )
    wanted = num_patches(vision)
    if plan.tokens == wanted:
        return
    advice = "take --vision-feature-select-strategy default"
    if plan.class_tokens > 1:
        advice = f"{vision.model_type} has registers among them; take a tower without, or --architecture llava"
    raise ConfigError(
        f"--architecture {architecture} takes the features of a tile as a square, but strategy {plan.strategy} "
        f"leaves {plan.tokens} features of {wanted} patches: {advice}"
    )


def _pixel_settings(images: BaseImageProcessor) -> dict[str, Any]:
    """Return how the tower's own image processor resizes and scales."""
    values = images.to_dict()
    return {name: values[name] for name in _PIXEL_SETTINGS if values.get(name) is not None}
