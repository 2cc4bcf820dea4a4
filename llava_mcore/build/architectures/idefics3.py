"""Idefics3 and SmolVLM: images are split into rows and columns of tiles, and four neighboring features become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from transformers import (
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

from llava_mcore.build.architectures.base import tile_settings
from llava_mcore.build.architectures.idefics import IdeficsFolder
from llava_mcore.build.language import IMAGE_TOKEN
from llava_mcore.build.vision import FeatureShape
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.registry import features_per_tile
from llava_mcore.models.vision.families.registry import tile_tower
from llava_mcore.models.vision.features import image_side

_TILES = 4
"""Tiles along the longest edge of an image, as in the processors of the published models."""
_MARKED = 6
"""Rows and columns of tiles with tokens of their own, as in the published tokenizers."""
_SAMPLING = {"fps": 1, "max_frames": 64}
"""Frames of a video, as in SmolVLM2's own processors."""


class Idefics3Folder(IdeficsFolder):
    """Idefics3, with the pixel shuffle of the class's own scale_factor."""

    model_class = Idefics3ForConditionalGeneration
    processor_class = Idefics3Processor
    vision_class = Idefics3VisionConfig
    connector = "pixel_shuffle"
    named_tokens: ClassVar[Mapping[str, str]] = {
        "image_token": IMAGE_TOKEN,
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    marks = tuple(f"<row_{i + 1}_col_{j + 1}>" for i in range(_MARKED) for j in range(_MARKED))

    def tokens_per_tile(self, config: PretrainedConfig) -> int:
        """Return the number of features of a tile.

        Raises:
            ConversionError: a grid that the shuffle does not divide, or whose positions transformers rounds.
        """
        vision = config.vision_config
        tile_tower(vision).config_from_hf(vision, vision.num_hidden_layers)
        return super().tokens_per_tile(config)

    def pinpoints(self, vision: PretrainedConfig) -> list[list[int]]:
        """Return height and width in pixels of the largest grid of tiles."""
        return [[_TILES * image_side(vision)] * 2]

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        how = _grid_settings(image_processor, config)
        return dict(image_processor=Idefics3ImageProcessor(**how), image_seq_len=features_per_tile(config))

    def widths(self, projector: nn.Module, hidden_size: int) -> list[int]:
        """Return the widths of a feature before and after the matrix."""
        return [projector.get_submodule("modality_projection.proj").get_parameter("weight").shape[1], hidden_size]


class SmolVlmFolder(Idefics3Folder):
    """SmolVLM, whose processor also takes videos: each frame is one tile."""

    model_class = SmolVLMForConditionalGeneration
    processor_class = SmolVLMProcessor
    vision_class = SmolVLMVisionConfig

    def processor(
        self,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        plan: FeatureShape,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor. Raises ConfigError if a package that it needs is not installed."""
        try:
            return super().processor(image_processor, tokenizer, config, plan, template)
        except ImportError as error:
            raise ConfigError(f"--architecture {self.architecture}: {error}") from error

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        how = _grid_settings(image_processor, config)
        size = how["max_image_size"]
        frame = how | {"size": size, "video_sampling": _SAMPLING | {"video_size": size}}
        return dict(
            image_processor=SmolVLMImageProcessor(**how),
            video_processor=SmolVLMVideoProcessor(**frame),
            image_seq_len=features_per_tile(config),
        )


def _grid_settings(image_processor: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return settings that cut images into tiles of the tower's size, normalized like the source's images."""
    side = image_side(config.vision_config)
    sizes = {"size": {"longest_edge": _TILES * side}, "max_image_size": {"longest_edge": side}}
    return tile_settings(image_processor, config) | sizes
