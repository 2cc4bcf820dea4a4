"""What differs between the Hugging Face classes that are built: fields of config.json, tokens, processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import (
    BaseImageProcessor,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    ProcessorMixin,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from llava_mcore.build.language import IMAGE_TOKEN, VIDEO_TOKEN, TokenIds
from llava_mcore.build.options import Architecture
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.errors import ConfigError
from llava_mcore.models.vision.geometry import image_side, num_patches, patch_side

ASPECT_RATIO = "anyres_max_9"
"""Of LLaVA-OneVision's own checkpoints: larger grids are resized to nine tiles."""
_PIXEL_SETTINGS = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""What a class's image processor takes over from the tower's own."""


@dataclass(frozen=True)
class BuiltClass:
    """LLaVA-1.5 with the tower and the features that it reads: a picture is one tile."""

    vision: PreTrainedConfig
    plan: FeaturePlan

    config_class: ClassVar[type[PreTrainedConfig]] = LlavaConfig
    media: ClassVar[tuple[str, ...]] = (IMAGE_TOKEN,)
    """The placeholders that the tokenizer needs."""
    grids: ClassVar[tuple[tuple[int, int], ...]] = ()
    """Rows and columns of tiles that a picture may be cut into."""

    @property
    def side(self) -> int:
        """Height and width of a tile in pixels."""
        return image_side(self.vision)

    @property
    def pinpoints(self) -> list[list[int]]:
        """Height and width of the grids in pixels."""
        return [[rows * self.side, columns * self.side] for rows, columns in self.grids]

    def config_fields(self, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of config.json that not every class has."""
        return {"image_seq_length": self.plan.tokens}

    def processor(self, images: BaseImageProcessor, tokenizer: Tokenizer, template: str) -> ProcessorMixin:
        """Return the processor; tokenizer and processor share one chat template. `images`: the tower's own."""
        return LlavaProcessor(image_processor=images, **self._by_patches(tokenizer, template))

    def _common(self, tokenizer: Tokenizer, template: str) -> dict[str, Any]:
        tokenizer.chat_template = template
        strategy = {"vision_feature_select_strategy": self.plan.strategy}
        return {"tokenizer": tokenizer, "image_token": IMAGE_TOKEN, "chat_template": template, **strategy}

    def _by_patches(self, tokenizer: Tokenizer, template: str) -> dict[str, Any]:
        counted = {"patch_size": patch_side(self.vision), "num_additional_image_tokens": self.plan.class_tokens}
        return self._common(tokenizer, template) | counted


class NextClass(BuiltClass):
    """LLaVA-NeXT: a base view and a grid, as LLaVA-1.6 has them."""

    config_class = LlavaNextConfig
    grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))

    def config_fields(self, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of config.json that not every class has."""
        return super().config_fields(ids) | {"image_grid_pinpoints": self.pinpoints}

    def processor(self, images: BaseImageProcessor, tokenizer: Tokenizer, template: str) -> ProcessorMixin:
        """Return the processor, whose image processor cuts pictures and scales them as the tower's own."""
        tiles = LlavaNextImageProcessor(
            size={"shortest_edge": self.side},
            crop_size={"height": self.side, "width": self.side},
            image_grid_pinpoints=self.pinpoints,
            **_pixel_settings(images),
        )
        return LlavaNextProcessor(image_processor=tiles, **self._by_patches(tokenizer, template))


class OnevisionClass(BuiltClass):
    """LLaVA-OneVision: large grids are resized, and there are videos."""

    config_class = LlavaOnevisionConfig
    media = (IMAGE_TOKEN, VIDEO_TOKEN)
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))

    def config_fields(self, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of config.json that not every class has."""
        own = {"vision_aspect_ratio": ASPECT_RATIO, "video_token_index": ids.video}
        return {"image_grid_pinpoints": self.pinpoints, **own}

    def processor(self, images: BaseImageProcessor, tokenizer: Tokenizer, template: str) -> ProcessorMixin:
        """Return the processor, whose image and video processors scale pictures as the tower's own."""
        settings = _pixel_settings(images) | {"size": {"height": self.side, "width": self.side}}
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=self.pinpoints, **settings),
            video_processor=LlavaOnevisionVideoProcessor(**settings),
            # The processor takes the class token off again.
            num_image_tokens=self.plan.tokens + int(self.plan.strategy == "default"),
            video_token=VIDEO_TOKEN,
            vision_aspect_ratio=ASPECT_RATIO,
            **self._common(tokenizer, template),
        )


_CLASSES: dict[Architecture, type[BuiltClass]] = {
    "llava": BuiltClass,
    "llava_next": NextClass,
    "llava_onevision": OnevisionClass,
}


def built_class(architecture: Architecture, vision: PreTrainedConfig, plan: FeaturePlan) -> BuiltClass:
    """Return the class with its tower.

    Raises:
        ConfigError: it lays features out as a square, and the tower's are none; or transformers cannot read the tower.
    """
    built = _CLASSES[architecture](vision, plan)
    if built.grids:
        _require_square(architecture, vision, plan)
    return built


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
        f"--architecture {architecture} lays the features of a tile out as a square, but strategy {plan.strategy} "
        f"leaves {plan.tokens} features of {wanted} patches: {advice}"
    )


def _pixel_settings(images: BaseImageProcessor) -> dict[str, Any]:
    """Return how the tower's own image processor resizes and scales."""
    values = images.to_dict()
    return {name: values[name] for name in _PIXEL_SETTINGS if values.get(name) is not None}
