"""Idefics2: images keep their proportions, and a perceiver makes the same number of tokens of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from transformers import (
    Idefics2ForConditionalGeneration,
    Idefics2ImageProcessor,
    Idefics2Processor,
    PretrainedConfig,
)
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig

from llava_mcore.build.architectures.base import tile_settings
from llava_mcore.build.architectures.idefics import IdeficsFolder
from llava_mcore.build.language import IMAGE_TOKEN
from llava_mcore.build.vision import FeatureShape
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.vision.features import image_side, patch_side

_SHORTEST = 378 / 980
"""Shortest edge of an image as a fraction of the longest, as in Idefics2's own processor."""


class Idefics2Folder(IdeficsFolder):
    """Idefics2, with a perceiver of the class's own sizes at the language model's width."""

    model_class = Idefics2ForConditionalGeneration
    processor_class = Idefics2Processor
    vision_class = Idefics2VisionConfig
    connector = "perceiver"
    tile = "image"
    resamples = True
    named_tokens: ClassVar[Mapping[str, str]] = {
        "image_token": IMAGE_TOKEN,
        "image_boundary_token": "<fake_token_around_image>",
    }

    def tokens_per_tile(self, config: PretrainedConfig) -> int:
        """Return the number of latents. Raises ConversionError for a language model that the class cannot have."""
        architecture_of(config).connector(config).config_from_hf(config)
        return int(config.perceiver_config.resampler_n_latents)

    def _connector_fields(self, text: PretrainedConfig) -> dict[str, Any]:
        return {"perceiver_config": {"hidden_size": text.hidden_size, "rms_norm_eps": text.rms_norm_eps}}

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        longest, patch = image_side(config.vision_config), patch_side(config.vision_config)
        size = {"shortest_edge": max(round(longest * _SHORTEST / patch), 1) * patch, "longest_edge": longest}
        how = tile_settings(image_processor, config) | {"size": size, "do_image_splitting": False}
        return dict(
            image_processor=Idefics2ImageProcessor(**how), image_seq_len=config.perceiver_config.resampler_n_latents
        )

    def widths(self, projector: nn.Module, hidden_size: int) -> list[int]:
        """Return the widths of a feature in the MLP before the latents."""
        gate = projector.get_submodule("modality_projection.gate_proj").get_parameter("weight")
        return [gate.shape[1], gate.shape[0], hidden_size]
