"""The Hugging Face class of a built folder, which its connector and its architecture decide: one kind each."""

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
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from llava_mcore.build.language import IMAGE_TOKEN, VIDEO_TOKEN, TokenIds
from llava_mcore.build.options import CONNECTORS, BuildOptions
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.registry import ARCHITECTURES
from llava_mcore.models.vision.geometry import image_side, num_patches, patch_side
from llava_mcore.models.vision.registry import towers_of_any_class

_ASPECT_RATIO = "anyres_max_9"
"""Of LLaVA-OneVision's own checkpoints: larger grids are resized to nine tiles."""
_PIXEL_SETTINGS = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""What a class's image processor takes over from the tower's own."""


class FolderClass(ABC):
    """A class with its configuration and its processor."""

    model_class: ClassVar[type[PreTrainedModel]]
    connector: ClassVar[str]
    layers: ClassVar[tuple[int, ...]]
    """vision_feature_layer, where none is asked for."""
    tile: ClassVar[str] = "tile"
    """What the tower sees at once."""
    named_tokens: ClassVar[Mapping[str, str]] = {}
    """Tokens that the tokenizer has under names which the class's processor asks for; the placeholder among them."""

    @property
    def architecture(self) -> str:
        """Its model_type."""
        return str(self.model_class.config_class.model_type)

    def require_tower(self, vision: PretrainedConfig, options: BuildOptions) -> None:
        """Raise ConfigError for a tower that the class does not read."""
        towers = ARCHITECTURES[self.architecture].towers or towers_of_any_class()
        if vision.model_type not in towers:
            raise ConfigError(
                f"--connector {self.connector} makes an {self.model_class.__name__}, whose tower is "
                f"{' or '.join(towers)} in transformers; --vision-model {options.vision_model} is {vision.model_type!r}"
            )

    def pinpoints(self, vision: PretrainedConfig) -> list[list[int]]:
        """Return height and width in pixels of the grids that pictures are cut into, where config.json lists them."""
        return []

    @abstractmethod
    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, ids: TokenIds
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


class GridFolder(FolderClass):
    """A base view and the grid that suits a picture's proportions, features arranged as squares."""

    connector = "mlp"
    layers = (-2,)
    grids: ClassVar[tuple[tuple[int, int], ...]]
    """Rows and columns of tiles."""

    def pinpoints(self, vision: PretrainedConfig) -> list[list[int]]:
        """Return height and width of the grids in pixels."""
        side = image_side(vision)
        return [[rows * side, columns * side] for rows, columns in self.grids]

    def _require_square(self, vision: PretrainedConfig, plan: FeaturePlan) -> None:
        """Raise ConfigError for features that are no square, or a tower that transformers cannot read in the class."""
        if not isinstance(vision.image_size, int):
            raise ConfigError(
                f"--architecture {self.architecture}: {vision.model_type} writes image_size as height and width, of "
                "which that class of transformers expects one number; take another tower or --architecture llava"
            )
        wanted = num_patches(vision)
        if plan.tokens == wanted:
            return
        advice = "take --vision-feature-select-strategy default"
        if plan.class_tokens > 1:
            advice = f"{vision.model_type} has registers among them; take a tower without, or --architecture llava"
        raise ConfigError(
            f"--architecture {self.architecture} takes the features of a tile as a square, but strategy "
            f"{plan.strategy} leaves {plan.tokens} features of {wanted} patches: {advice}"
        )


class NextFolder(GridFolder):
    """LLaVA-NeXT: the grids of LLaVA-1.6."""

    model_class = LlavaNextForConditionalGeneration
    grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole. Raises ConfigError for features that are no square."""
        self._require_square(vision, plan)
        return LlavaNextConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=ids.image,
            image_seq_length=plan.tokens,
            image_grid_pinpoints=self.pinpoints(vision),
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
        """Return the processor; tiles are resized and normalised as the source's pictures are."""
        how = _tile_settings(image_processor, config)
        side = image_side(config.vision_config)
        # The size as the class's own checkpoints write it.
        how |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return LlavaNextProcessor(
            image_processor=LlavaNextImageProcessor(image_grid_pinpoints=config.image_grid_pinpoints, **how),
            tokenizer=tokenizer,
            patch_size=patch_side(config.vision_config),
            vision_feature_select_strategy=plan.strategy,
            num_additional_image_tokens=plan.class_tokens,
            image_token=IMAGE_TOKEN,
            chat_template=template,
        )


class OnevisionFolder(GridFolder):
    """LLaVA-OneVision: large grids are resized, and there are videos."""

    model_class = LlavaOnevisionForConditionalGeneration
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
    named_tokens: ClassVar[Mapping[str, str]] = {"image_token": IMAGE_TOKEN, "video_token": VIDEO_TOKEN}

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole. Raises ConfigError for features that are no square."""
        self._require_square(vision, plan)
        return LlavaOnevisionConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=ids.image,
            video_token_index=ids.video,
            image_grid_pinpoints=self.pinpoints(vision),
            vision_aspect_ratio=_ASPECT_RATIO,
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
        """Return the processor; tiles and frames are resized and normalised as the source's pictures are."""
        how = _tile_settings(image_processor, config)
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=config.image_grid_pinpoints, **how),
            tokenizer=tokenizer,
            video_processor=LlavaOnevisionVideoProcessor(**how),
            # The processor takes the class token off again.
            num_image_tokens=plan.tokens + int(plan.strategy == "default"),
            vision_feature_select_strategy=plan.strategy,
            image_token=IMAGE_TOKEN,
            video_token=VIDEO_TOKEN,
            vision_aspect_ratio=config.vision_aspect_ratio,
            chat_template=template,
        )


class InternVlFolder(FolderClass):
    """InternVL: pictures are cut into tiles, of which four neighbouring features become one."""

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
        """Return the processor; tiles are resized and normalised as the source's pictures are."""
        how = _tile_settings(image_processor, config)
        return InternVLProcessor(
            image_processor=GotOcr2ImageProcessor(**how),
            tokenizer=tokenizer,
            video_processor=InternVLVideoProcessor(**how),
            image_seq_length=config.image_seq_length,
            chat_template=template,
        )


_CLASSES: tuple[FolderClass, ...] = (LlavaFolder(), NextFolder(), OnevisionFolder(), InternVlFolder())


def folder_class(options: BuildOptions) -> FolderClass:
    """Return the class of the folder.

    Raises:
        ConfigError: a connector or an architecture that is not known, or an architecture with another's connector.
    """
    if options.connector not in (None, *CONNECTORS):
        raise ConfigError(f"--connector {options.connector}: no class has it; choose one of {', '.join(CONNECTORS)}")
    kinds = [kind for kind in _CLASSES if options.architecture in (None, kind.architecture)]
    if not kinds:
        known = ", ".join(kind.architecture for kind in _CLASSES)
        raise ConfigError(f"--architecture {options.architecture}: cannot be built; choose one of {known}")
    for kind in kinds:
        if options.connector in (None, kind.connector):
            return kind
    raise ConfigError(
        f"--architecture {options.architecture} has the connector {kinds[0].connector}; --connector "
        f"{options.connector} does not fit it: leave one of them out"
    )


def _tile_settings(image_processor: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return settings that resize tiles to the tower's size and normalise them as the source's pictures are."""
    side, values = image_side(config.vision_config), image_processor.to_dict()
    own = {name: values[name] for name in _PIXEL_SETTINGS if values.get(name) is not None}
    return own | {"size": {"height": side, "width": side}}
