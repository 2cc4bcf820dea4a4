"""The interface of a vision tower family: one file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from llava_mcore.media.batch_fields import Fields, MediaWork
from llava_mcore.models.vision.features import FeatureChoice, image_side, num_patches, patch_side
from llava_mcore.models.vision.patches import PatchShape, PatchTransformer
from llava_mcore.models.vision.transformer import VisionShape, VisionTransformer
from llava_mcore.weights.table import Entry


@dataclass(frozen=True)
class TowerWork:
    """The size of a tower's work: patches, positions of its layers, (query, key) pairs over all layers that run."""

    num_patches: int
    num_positions: int
    num_pairs: int


class VisionFamily(ABC):
    """The towers of some Hugging Face model_types."""

    model_types: ClassVar[tuple[str, ...]]
    pair: ClassVar[str | None] = None
    """model_type of folders with such a tower and a text encoder."""
    wrapped: ClassVar[bool] = False
    """Whether its tensors have `vision_model.` in their names in llava-hf's checkpoints.

    transformers since 5.6 writes them without, but reads both; vLLM's LLaVA loader (0.33) only knows the name with it.
    """
    part_of_a_class: ClassVar[bool] = False
    """Whether only the Hugging Face classes that name it have such a tower."""
    name_in_messages: ClassVar[str] = "vision tower"
    """Its name in messages."""
    constants: ClassVar[tuple[str, ...]] = ()
    """Parameters that are frozen unless a pattern unfreezes them."""
    uses_rope: ClassVar[bool] = False
    """Whether its layers rotate queries and keys."""

    @abstractmethod
    def config_from_hf(self, hf: PretrainedConfig, num_layers: int) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for unsupported settings."""

    @abstractmethod
    def build(self, hf: PretrainedConfig, config: TransformerConfig, features: FeatureChoice) -> VisionModule:
        """Build the tower's module."""

    @abstractmethod
    def weight_entries(self, hf: PretrainedConfig, *, megatron: str, prefix: str, num_layers: int) -> list[Entry]:
        """Return the entries of the used layers and of everything before them."""

    @abstractmethod
    def unused(self, hf: PretrainedConfig, *, prefix: str, num_layers: int) -> dict[str, str]:
        """Return the tensors that training does not use, with the reason."""

    @abstractmethod
    def work(self, hf: PretrainedConfig, media: MediaWork, num_layers: int) -> TowerWork:
        """Return what the first num_layers layers compute on."""

    @abstractmethod
    def describe(self, hf: PretrainedConfig) -> str:
        """Say which images the tower takes."""

    def patch_dim(self, hf: PretrainedConfig) -> int:
        """Return the number of values in a flattened patch."""
        return int(hf.num_channels) * patch_side(hf) ** 2

    def embedding_products(self, hf: PretrainedConfig, num_patches: int) -> list[int]:
        """Return the FLOPs of the products before the layers, in the order of the forward pass."""
        return [2 * num_patches * self.patch_dim(hf) * self.hidden_size(hf)]

    def has_class_token(self, hf: PretrainedConfig) -> bool:
        """Tell whether a token for the whole image stands before its patches."""
        return False

    def num_layers(self, hf: PretrainedConfig) -> int:
        """Return the layers of the whole tower."""
        return int(hf.num_hidden_layers)

    def hidden_size(self, hf: PretrainedConfig) -> int:
        """Return the width of the tower's layers."""
        return int(hf.hidden_size)

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside the MLPs; where they are gated, of the gate alone."""
        return int(hf.intermediate_size)

    def padded_ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the same in the model, which may pad it with zeros."""
        return self.ffn_size(hf)


class TileTower(VisionFamily):
    """Towers that take images of one square size."""

    interpolates: ClassVar[bool] = True
    """Whether its transformers model takes images of any size as it is."""

    @abstractmethod
    def tokens_before_patches(self, hf: PretrainedConfig) -> int:
        """Return how many tokens stand before an image's patches: class token and registers."""

    @abstractmethod
    def shape(self, hf: PretrainedConfig) -> VisionShape:
        """Return what surrounds the layers."""

    def build(self, hf: PretrainedConfig, config: TransformerConfig, features: FeatureChoice) -> VisionTransformer:
        """Build the tower's module."""
        return VisionTransformer(config, self.shape(hf), features)

    def num_positions(self, hf: PretrainedConfig) -> int:
        """Return the features of a tile, including class token and registers."""
        return num_patches(hf) + self.tokens_before_patches(hf)

    def has_class_token(self, hf: PretrainedConfig) -> bool:
        """Return whether there is a token for the whole image before its patches."""
        return self.tokens_before_patches(hf) > 0

    def work(self, hf: PretrainedConfig, media: MediaWork, num_layers: int) -> TowerWork:
        """Return what the first num_layers layers compute on: every token of a tile sees every other."""
        tiles, positions = media.num_tiles, self.num_positions(hf)
        return TowerWork(tiles * num_patches(hf), tiles * positions, tiles * positions**2 * num_layers)

    def describe(self, hf: PretrainedConfig) -> str:
        """Say which images the tower takes."""
        side = image_side(hf)
        return f"{side} x {side} pixels in patches of {patch_side(hf)}"


class PatchTower(VisionFamily):
    """Towers that take images of any size as packed patches."""

    part_of_a_class = True
    fields: ClassVar[Fields]
    """Fields of a micro-batch of images for this tower."""

    @abstractmethod
    def shape(self, hf: PretrainedConfig) -> PatchShape:
        """Return what surrounds the layers."""

    def build(self, hf: PretrainedConfig, config: TransformerConfig, features: FeatureChoice) -> PatchTransformer:
        """Build the tower's module."""
        return PatchTransformer(config, self.shape(hf), features)

    def work(self, hf: PretrainedConfig, media: MediaWork, num_layers: int) -> TowerWork:
        """Return what the layers compute on: every patch of an image sees every other."""
        return TowerWork(media.num_patches, media.num_patches, media.num_pairs * num_layers)

    def describe(self, hf: PretrainedConfig) -> str:
        """Say which images the tower takes."""
        return f"images of any size in patches of {patch_side(hf)}"
