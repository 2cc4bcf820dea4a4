"""What a build asks of the Hugging Face class that it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from llava_mcore.build.language import TokenIds
from llava_mcore.build.options import BuildOptions
from llava_mcore.build.vision import FeaturePlan
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.registry import ARCHITECTURES
from llava_mcore.models.vision.geometry import image_side
from llava_mcore.models.vision.registry import towers_of_any_class

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


def tile_settings(image_processor: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return settings that resize tiles to the tower's size and normalize them as the source's pictures are."""
    side, values = image_side(config.vision_config), image_processor.to_dict()
    own = {name: values[name] for name in _PIXEL_SETTINGS if values.get(name) is not None}
    return own | {"size": {"height": side, "width": side}}
