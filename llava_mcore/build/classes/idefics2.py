"""Idefics2: pictures keep their proportions, and a perceiver makes the same number of tokens of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    Idefics2ImageProcessor,
    Idefics2Processor,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig

from llava_mcore.build.classes.base import FolderClass, tile_settings
from llava_mcore.build.language import IMAGE_TOKEN, TokenIds
from llava_mcore.build.options import BuildOptions
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.vision.geometry import image_side, patch_side

_TOWER = "siglip_vision_model"
_SHORTEST = 378 / 980
"""Shortest edge of a picture as a fraction of the longest, as in Idefics2's own processor."""
_SHARED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size"),
    *("patch_size", "hidden_act", "layer_norm_eps", "attention_dropout"),
)
"""Settings that SigLIP's configuration shares with that of Idefics2's tower."""


class Idefics2Folder(FolderClass):
    """Idefics2 with a SigLIP: its own tower is a SigLIP without pooling head."""

    model_class = Idefics2ForConditionalGeneration
    processor_class = Idefics2Processor
    connector = "perceiver"
    layers = (-1,)
    tile = "picture"
    resamples = True
    parts = ("vision_model", "connector", "text_model")
    named_tokens: ClassVar[Mapping[str, str]] = {
        "image_token": IMAGE_TOKEN,
        "image_boundary_token": "<fake_token_around_image>",
    }

    def require_tower(self, vision: PretrainedConfig, options: BuildOptions) -> None:
        """Raise ConfigError for a tower other than SigLIP, and for settings that the class does not have."""
        if vision.model_type != _TOWER:
            raise ConfigError(
                f"--connector {self.connector} builds {self.model_class.__name__}, whose tower is a SigLIP ({_TOWER}); "
                f"--vision-model {options.vision_model} is {vision.model_type!r}"
            )
        if options.expand_projector or options.vision_feature_layers not in (None, self.layers):
            raise ConfigError(
                f"--connector {self.connector} reads the tower's last layer: omit --expand-projector and "
                "--vision-feature-layer"
            )

    def tokens_per_tile(self, config: PretrainedConfig) -> int:
        """Return the number of latents. Raises ConversionError for a language model that the class cannot have."""
        architecture_of(config).connector(config).config_from_hf(config)
        return int(config.perceiver_config.resampler_n_latents)

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeaturePlan, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole model, with the class's own perceiver at the language model's width."""
        return Idefics2Config(
            text_config=text,
            vision_config=Idefics2VisionConfig(**{name: getattr(vision, name) for name in _SHARED}),
            perceiver_config={"hidden_size": text.hidden_size, "rms_norm_eps": text.rms_norm_eps},
            image_token_id=ids.image,
            tie_word_embeddings=text.tie_word_embeddings,
        )

    def _config_fields(self, vision: PretrainedConfig, plan: FeaturePlan, ids: TokenIds) -> dict[str, Any]:
        return {}

    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeaturePlan) -> dict[str, Any]:
        longest, patch = image_side(config.vision_config), patch_side(config.vision_config)
        size = {"shortest_edge": max(round(longest * _SHORTEST / patch), 1) * patch, "longest_edge": longest}
        how = tile_settings(image_processor, config) | {"size": size, "do_image_splitting": False}
        return dict(
            image_processor=Idefics2ImageProcessor(**how), image_seq_len=config.perceiver_config.resampler_n_latents
        )

    def place(self, model: PreTrainedModel, language: PreTrainedModel, vision: PreTrainedModel) -> None:
        """Put the source's modules into a model without memory; the tower without its pooling head."""
        model.model.text_model = language.model
        model.lm_head = language.lm_head
        used = {name: x for name, x in vision.state_dict().items() if not name.startswith("head.")}
        model.model.vision_model.load_state_dict(used, assign=True)

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the model's tensors by their names in files, which are those of the modules."""
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        return {name: x for name, x in model.state_dict().items() if name not in tied}

    def widths(self, projector: nn.Module, hidden_size: int) -> list[int]:
        """Return the widths of a feature in the MLP before the latents."""
        gate = projector.get_submodule("modality_projection.gate_proj").get_parameter("weight")
        return [gate.shape[1], gate.shape[0], hidden_size]
