"""Base class of the Hugging Face classes that a build can write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from llava_mcore.build.language import TokenIds
from llava_mcore.build.options import BuildOptions
from llava_mcore.build.vision import FeatureShape
from llava_mcore.compat.transformers import tower_tensors_in_files
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.registry import ARCHITECTURES, ties_embeddings, tile_architecture, tower_config
from llava_mcore.models.vision.families.registry import towers_of_any_class, vision_family
from llava_mcore.models.vision.features import image_side


def tensors_to_write(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's tensors by their names in files; a tied lm_head is omitted."""
    tower = "vision_tower.vision_model." if vision_family(tower_config(model.config)).wrapped else "vision_tower."
    prefixes = {
        "model.vision_tower.": tower,
        "model.audio_tower.": "audio_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.image_newline": "image_newline",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    named = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and ties_embeddings(model.config):
            continue
        prefix = next(x for x in prefixes if name.startswith(x))
        named[prefixes[prefix] + name.removeprefix(prefix)] = tensor
    return tower_tensors_in_files(named, tower, tower_config(model.config).model_type)


_PIXEL_SETTINGS = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""Settings that a class's image processor takes over from the tower's."""


class FolderClass(ABC):
    """A Hugging Face class with its configuration and its processor."""

    model_class: ClassVar[type[PreTrainedModel]]
    processor_class: ClassVar[type[ProcessorMixin]]
    connector: ClassVar[str]
    layers: ClassVar[tuple[int, ...]]
    """Default vision_feature_layer."""
    tile: ClassVar[str] = "tile"
    """Name of one input of the tower, for messages."""
    parts: ClassVar[tuple[str, str, str]] = ("vision_tower", "multi_modal_projector", "language_model")
    """Names of tower, connector and language model in the model."""
    resamples: ClassVar[bool] = False
    """Whether an image becomes the same number of tokens whatever its size."""
    named_tokens: ClassVar[Mapping[str, str]] = {}
    """Special tokens by the names under which the class's processor asks the tokenizer for them."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Other special tokens that the class's processor writes."""

    @property
    def architecture(self) -> str:
        """The class's model_type."""
        return str(self.model_class.config_class.model_type)

    def require_tower(self, vision: PretrainedConfig, options: BuildOptions) -> None:
        """Raise ConfigError for a tower that the class does not support."""
        towers = ARCHITECTURES[self.architecture].towers or towers_of_any_class()
        if vision.model_type not in towers:
            raise ConfigError(
                f"--connector {self.connector} builds {self.model_class.__name__}, whose tower is "
                f"{' or '.join(towers)} in transformers; --vision-model {options.vision_model} is {vision.model_type!r}"
            )

    def tokens_per_tile(self, config: PretrainedConfig) -> int:
        """Return the number of features of one input of the tower that reach the language model.

        Raises:
            ConversionError: the connector does not support the tower's features.
        """
        return tile_architecture(config).features_per_tile(config)

    def projector(self, model: PreTrainedModel) -> nn.Module:
        """Return the connector."""
        return model.get_submodule(f"model.{self.parts[1]}")

    def place(self, model: PreTrainedModel, language: PreTrainedModel, vision: PreTrainedModel) -> None:
        """Put the source's modules into a model without memory. Both share their parameters then."""
        model.model.language_model = language.model
        model.lm_head = language.lm_head
        model.model.vision_tower = vision

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the model's tensors by their names in files; a tied lm_head is omitted."""
        return tensors_to_write(model)

    def widths(self, projector: nn.Module, hidden_size: int) -> list[int]:
        """Return the widths of a feature on its way through the projector. `hidden_size`: the language model's."""
        return [projector.get_submodule("linear_1").get_parameter("weight").shape[1], hidden_size, hidden_size]

    def pinpoints(self, vision: PretrainedConfig) -> list[list[int]]:
        """Return height and width in pixels of grids of tiles, the largest among them; empty if there are none."""
        return []

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole model, which contains those of its parts.

        Raises:
            ConfigError: the class does not support the tower's features.
        """
        return self.model_class.config_class(
            text_config=text,
            vision_config=vision,
            vision_feature_layer=plan.config_value,
            vision_feature_select_strategy=plan.strategy,
            tie_word_embeddings=text.tie_word_embeddings,
            **self._config_fields(vision, plan, ids),
        )

    @abstractmethod
    def _config_fields(self, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds) -> dict[str, Any]:
        """Return the fields of the configuration that only this class has."""

    def processor(
        self,
        image_processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        plan: FeatureShape,
        template: str,
    ) -> ProcessorMixin:
        """Return the processor. `image_processor`: the source's, for images of the tower's size."""
        return self.processor_class(
            tokenizer=tokenizer,
            chat_template=template,
            **self._processor_fields(image_processor, config, plan),
        )

    @abstractmethod
    def _processor_fields(self, image_processor: Any, config: PretrainedConfig, plan: FeatureShape) -> dict[str, Any]:
        """Return the other arguments of the processor, with its image processor."""


def tile_settings(image_processor: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return settings that resize tiles to the tower's size and normalize them like the source's image processor."""
    side, values = image_side(config.vision_config), image_processor.to_dict()
    settings = {name: values[name] for name in _PIXEL_SETTINGS if values.get(name) is not None}
    return settings | {"size": {"height": side, "width": side}}
