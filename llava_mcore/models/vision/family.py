"""What the code asks of a vision tower's family: one file beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from transformers import PretrainedConfig

from llava_mcore.mapping.table import Entry
from llava_mcore.models.vision.geometry import num_patches
from llava_mcore.models.vision.transformer import VisionShape


class VisionFamily(ABC):
    """The towers of some model_types of Hugging Face."""

    model_types: ClassVar[tuple[str, ...]]
    pair: ClassVar[str | None] = None
    """model_type of folders that hold such a tower beside a text encoder."""
    wrapped: ClassVar[bool] = False
    """Whether its tensors have `vision_model.` in their names in llava-hf's checkpoints.

    transformers since 5.6 writes them without, but reads both; vLLM's LLaVA loader (0.33) only knows the name with it.
    """
    part_of_a_class: ClassVar[bool] = False
    """Whether only the Hugging Face classes that name it have such a tower."""
    interpolates: ClassVar[bool] = True
    """Whether its transformers model takes pictures of any size as it is."""

    @abstractmethod
    def tokens_before_patches(self, hf: PretrainedConfig) -> int:
        """Return how many tokens stand before a picture's patches: class token and registers."""

    @abstractmethod
    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for what cannot be computed."""

    @abstractmethod
    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return what surrounds the layers."""

    @abstractmethod
    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the layers that are used and of what comes before them."""

    @abstractmethod
    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Name the tensors that training does not use, with the reason."""

    def num_positions(self, hf: PretrainedConfig) -> int:
        """Return the features of a tile, class token and registers included."""
        return num_patches(hf) + self.tokens_before_patches(hf)

    def has_class_token(self, hf: PretrainedConfig) -> bool:
        """Tell whether a token for the whole picture stands before its patches."""
        return self.tokens_before_patches(hf) > 0

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside the MLPs; where they are gated, of the gate alone."""
        return int(hf.intermediate_size)
