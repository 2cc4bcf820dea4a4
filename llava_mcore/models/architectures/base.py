"""What the code asks of an architecture: one Hugging Face class, one file beside this one.

What architectures share is elsewhere (`models.multimodal`, `models.table`); here stands what they differ in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from transformers import PretrainedConfig, PreTrainedModel

from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.media import MediaPlan
from llava_mcore.models.names import KnownNames
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.models.vision.registry import vision_family


class Architecture(ABC):
    """A Hugging Face class: its parts, its names, how its pictures become tokens."""

    config_class: ClassVar[type[PretrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]
    """Opens the folder; what `check` compares logits with."""
    names: ClassVar[KnownNames]
    """The names that its tensors have had in files."""

    @abstractmethod
    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return what stands between tower and language model. Raises ConversionError for one that is not known."""

    @abstractmethod
    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return which of the tower's hidden states are used. Raises ConversionError for one that it does not have."""

    @abstractmethod
    def media(self, hf: PretrainedConfig) -> MediaPlan:
        """Return how pictures become tokens. Raises ConversionError for settings that the tower cannot take."""

    def tower_features_per_tile(self, hf: PretrainedConfig) -> int:
        """Return how many features of a tile the tower hands to the connector."""
        positions = vision_family(hf.vision_config).num_positions(hf.vision_config)
        return positions - int(self.features(hf).drop_first_token)

    def features_per_tile(self, hf: PretrainedConfig) -> int:
        """Return how many features of a tile the connector returns."""
        return self.connector(hf).num_features(hf, self.tower_features_per_tile(hf))
