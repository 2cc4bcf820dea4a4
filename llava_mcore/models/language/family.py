"""The interface of a language model family: one file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from transformers import PretrainedConfig

from llava_mcore.models.language.shape import DecoderShape
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import Entry


class LanguageFamily(ABC):
    """The decoders of some Hugging Face model_types."""

    model_types: ClassVar[tuple[str, ...]]
    part_of_a_class: ClassVar[bool] = False
    """Whether only the Hugging Face classes that name it have such a decoder."""
    computes_windows: ClassVar[bool] = False
    """Whether sliding windows are supported; otherwise sequences must not be longer than the window."""

    @abstractmethod
    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for unsupported settings."""

    @abstractmethod
    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have."""

    @abstractmethod
    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
