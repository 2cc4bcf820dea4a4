"""The interface of an architecture: one Hugging Face class, one file in this folder.

Shared code is in `models.multimodal` and `models.model_table`; this interface has what differs between architectures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llava_mcore.media.batch_fields import IMAGE_FIELDS, Fields, MediaWork
from llava_mcore.media.media import MediaPlan, Processing
from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.vision.families.registry import tile_tower
from llava_mcore.models.vision.features import FeatureChoice, image_side
from llava_mcore.weights.names import KnownNames


class Architecture(ABC):
    """A Hugging Face class: its parts, its names, and how its images become tokens."""

    config_class: ClassVar[type[PretrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]
    """Class that opens the folder; `check` compares logits with it."""
    names: ClassVar[KnownNames]
    """Names of its tensors in files."""
    fields: ClassVar[Fields] = IMAGE_FIELDS
    """Fields of a micro-batch's media."""
    pads_images: ClassVar[bool] = False
    """Whether transformers' model pads the images of a batch to one size, and ours does not. `check` then compares
    an image that is not split, of which both have the same patches."""
    tower_section: ClassVar[str] = "vision_config"
    """Section of config.json that describes the tower."""
    takes_images: ClassVar[bool] = True
    """Whether its samples may have images."""
    takes_audios: ClassVar[bool] = False
    """Whether its `MediaPlan` has an `audio_token_id` and tokens for audio."""
    resizes_to_range: ClassVar[bool] = False
    """Whether its image processor resizes images to a range of areas, its size's shortest_edge and longest_edge."""
    takes_videos: ClassVar[bool] = False
    """Whether its `MediaPlan` has a `video_token_id` and tokens for videos."""
    towers: ClassVar[tuple[str, ...]] = ()
    """model_types of its towers in transformers; empty: all towers that do not belong to a single class."""
    texts: ClassVar[tuple[str, ...]] = ()
    """model_types of its language models in transformers; empty: all that do not belong to a single class."""

    may_tie_embeddings: ClassVar[bool] = True
    """Whether transformers' class can have one matrix for embedding and output layer."""

    def ties_embeddings(self, hf: PretrainedConfig) -> bool:
        """Return whether the output layer has the weight of the embedding."""
        return self.may_tie_embeddings and bool(hf.tie_word_embeddings)

    @property
    def has_newline(self) -> bool:
        """Whether a trained vector follows each row of an image's features; it is a parameter of the connector."""
        return bool(self.names.newline)

    @abstractmethod
    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the connector between tower and language model. Raises ConversionError for an unknown one."""

    @abstractmethod
    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return which of the tower's hidden states are used. Raises ConversionError for one that does not exist."""

    @abstractmethod
    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return how images, videos or audio become tokens.

        Raises:
            ConversionError: settings that the tower does not support.
        """

    def placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the placeholder token of an image in text."""
        return str(tokenizer.special_tokens_map.get("image_token", "<image>"))

    def video_placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the placeholder token of a video in text."""
        return str(tokenizer.special_tokens_map.get("video_token", "<video>"))

    def audio_placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the placeholder token of an audio clip in text."""
        return str(tokenizer.special_tokens_map.get("audio_token", "<audio>"))

    @abstractmethod
    def pixel_shape(self, hf: PretrainedConfig) -> tuple[int, ...]:
        """Return the shape of a row of PIXEL_VALUES: a tile [3, height, width], a patch, or a mel frame."""

    @abstractmethod
    def connector_products(self, hf: PretrainedConfig, work: MediaWork) -> list[int]:
        """Return the FLOPs of the connector's matrix products with weights, in the order of the forward pass."""

    def connector_attention(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return the FLOPs of the connector's products of two activations."""
        return 0

    @abstractmethod
    def connector_rows(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return how many features the connector's first linear layer reads."""

    def processor_problems(self, hf: PretrainedConfig, settings: Mapping[str, Any]) -> list[str]:
        """Return why a processor would expand an image to other tokens than `media`, one message each.

        Args:
            settings: its processor_config.json.
        """
        return []

    def num_deepstack(self, hf: PretrainedConfig) -> int:
        """Return how many inner layers of the tower have features that are added in the language model."""
        return 0


class TileArchitecture(Architecture):
    """A class whose tower takes images of one size: an image is one or several of these tiles."""

    def pixel_shape(self, hf: PretrainedConfig) -> tuple[int, ...]:
        """Return the shape of a tile, [3, height, width]."""
        side = image_side(hf.vision_config)
        return (3, side, side)

    def connector_products(self, hf: PretrainedConfig, work: MediaWork) -> list[int]:
        """Return the FLOPs of the connector's matrix products with weights, in the order of the forward pass."""
        width = hf.vision_config.hidden_size * len(self.features(hf).layers)
        per_tile = self.connector(hf).products(hf, input_size=width, num_features=self.tower_features_per_tile(hf))
        return [work.num_tiles * product for product in per_tile]

    def connector_rows(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return how many features the connector reads."""
        return work.num_tiles * self.tower_features_per_tile(hf)

    def processor_problems(self, hf: PretrainedConfig, settings: Mapping[str, Any]) -> list[str]:
        """Return why a processor would expand an image to other tokens than `media`, a message each."""
        if settings.get("patch_size") is None:
            return []  # written before processors expanded the placeholder
        expected = self.features_per_tile(hf)
        side = image_side(hf.vision_config) // int(settings["patch_size"])
        served = side**2 + int(settings.get("num_additional_image_tokens") or 0)
        served -= 1 if settings.get("vision_feature_select_strategy") == "default" else 0
        if served == expected:
            return []
        return [
            f"patch_size, num_additional_image_tokens and vision_feature_select_strategy give {served} tokens per "
            f"image, but the model's config.json gives {expected} features; correct the processor's settings"
        ]

    def tower_features_per_tile(self, hf: PretrainedConfig) -> int:
        """Return the number of features per tile that the tower passes to the connector."""
        positions = tile_tower(hf.vision_config).num_positions(hf.vision_config)
        return positions - int(self.features(hf).drop_first_token)

    def features_per_tile(self, hf: PretrainedConfig) -> int:
        """Return the number of features per tile that the connector returns."""
        return self.connector(hf).num_features(hf, self.tower_features_per_tile(hf))
