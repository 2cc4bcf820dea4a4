"""What the code asks of a language model's family: one file beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from transformers import PretrainedConfig

from llava_mcore.mapping.table import Entry
from llava_mcore.models.language.shape import DecoderShape
from llava_mcore.models.names import TextNames


class LanguageFamily(ABC):
    """The decoders of some model_types of Hugging Face."""

    model_types: ClassVar[tuple[str, ...]]
    part_of_a_class: ClassVar[bool] = False
    """Whether only the Hugging Face classes that name it have such a decoder."""
    computes_windows: ClassVar[bool] = False
    """Whether sliding windows are computed as they are; others must not meet sequences longer than theirs."""

    @abstractmethod
    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for what cannot be computed."""

    @abstractmethod
    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return what TransformerConfig does not say."""

    @abstractmethod
    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""
