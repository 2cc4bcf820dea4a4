"""Qwen2-Audio: Whisper's encoder, a linear projector, and a decoder; audio clips instead of images."""

from __future__ import annotations

from typing import ClassVar

from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
)

from llava_mcore.media.batch_fields import AUDIO_FIELDS, Fields, MediaWork
from llava_mcore.media.clip_plan import AudioPlan
from llava_mcore.media.media import MediaPlan, Processing
from llava_mcore.models.architectures.base import Architecture
from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.connectors.linear import LinearConnector
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.weights.names import HfNames, KnownNames

_HUB = HfNames("audio_tower.", "multi_modal_projector.", "language_model.model.", "language_model.lm_head.weight")
_NEW = HfNames("model.audio_tower.", "model.multi_modal_projector.", "model.language_model.", "lm_head.weight")
_TWICE = HfNames(
    "audio_tower.", "multi_modal_projector.", "language_model.model.model.", "language_model.lm_head.weight"
)
"""transformers 5.17 applies two of its renamings one after the other when it saves."""


class Qwen2Audio(Architecture):
    """Qwen2AudioForConditionalGeneration."""

    config_class = Qwen2AudioConfig
    model_class = Qwen2AudioForConditionalGeneration
    names: ClassVar[KnownNames] = KnownNames(
        vision=(_NEW.vision, _HUB.vision),
        projection=(_NEW.projection, _HUB.projection),
        text=(_TWICE.text, _NEW.text, _HUB.text),
        lm_head={_TWICE.text: _TWICE.lm_head, _NEW.text: _NEW.lm_head, _HUB.text: _HUB.lm_head},
        styles=(_HUB, _NEW, _TWICE),
    )
    fields: ClassVar[Fields] = AUDIO_FIELDS
    tower_section = "audio_config"
    towers = ("qwen2_audio_encoder",)
    takes_images = False
    takes_audios = True
    may_tie_embeddings = False

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the linear layer."""
        return LinearConnector()

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the last layer's output."""
        return FeatureChoice((int(hf.audio_config.encoder_layers),), drop_first_token=False)

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return how many tokens a clip has."""
        return AudioPlan(hf, processing.feature_extractor)

    def audio_placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the token that stands for a clip in text."""
        return str(tokenizer.special_tokens_map.get("audio_token", "<|AUDIO|>"))

    def pixel_shape(self, hf: PretrainedConfig) -> tuple[int, ...]:
        """Return the mel bins of a row."""
        return (int(hf.audio_config.num_mel_bins),)

    def connector_products(self, hf: PretrainedConfig, work: MediaWork) -> list[int]:
        """Return the FLOPs of the linear layer."""
        width, rows = int(hf.audio_config.d_model), self.connector_rows(hf, work)
        return self.connector(hf).products(hf, input_size=width, num_features=rows)

    def connector_rows(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return how many pairs of frames it reads; the last frames of clips of an odd number count half."""
        return work.num_patches // 2
