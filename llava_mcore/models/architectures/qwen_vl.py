"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 (dense): images of any size, and positions of time, height and width."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Model,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeModel,
)

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import Fields, MediaWork
from llava_mcore.media.media import MediaPlan, Processing
from llava_mcore.models.architectures.base import Architecture
from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.connectors.patch_merger import MergerNames, PatchMerger
from llava_mcore.models.vision.families.qwen import (
    Qwen2VlTower,
    Qwen3VlMoeTower,
    Qwen3VlTower,
    Qwen25VlTower,
    Qwen35MoeTower,
    Qwen35Tower,
)
from llava_mcore.models.vision.families.registry import qwen_tower
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.models.vision.patch_plan import PatchPlan, TimedPlan, TimestampPlan
from llava_mcore.weights.names import HfNames, KnownNames

_OLD = HfNames("visual.", "visual.", "model.", "lm_head.weight")
_NEW = HfNames("model.visual.", "model.visual.", "model.language_model.", "lm_head.weight")
"""The mergers are part of the tower in files, so both have one prefix."""
_NAMES = KnownNames(
    vision=(_NEW.vision, _OLD.vision),
    projection=(_NEW.projection, _OLD.projection),
    text=(_NEW.text, _OLD.text),
    lm_head={_NEW.text: _NEW.lm_head, _OLD.text: _OLD.lm_head},
    styles=(_OLD, _NEW),
)
_MERGER, _NEW_MERGER = MergerNames("ln_q", "mlp.0", "mlp.2"), MergerNames("norm", "linear_fc1", "linear_fc2")


class Qwen2Vl(Architecture):
    """Qwen2VLForConditionalGeneration."""

    config_class = Qwen2VLConfig
    model_class = Qwen2VLForConditionalGeneration
    names: ClassVar[KnownNames] = _NAMES
    fields: ClassVar[Fields] = Qwen2VlTower.fields
    towers = Qwen2VlTower.model_types
    texts = ("qwen2_vl_text",)
    whole_model: ClassVar[type[PreTrainedModel]] = Qwen2VLModel
    """Hugging Face class whose `get_rope_index` defines the position ids."""
    plan: ClassVar[type[PatchPlan]] = PatchPlan
    resizes_to_range = True
    takes_videos = True

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the merger."""
        return PatchMerger(_MERGER, "LayerNorm", out_size_key="hidden_size")

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the last layer's output."""
        return FeatureChoice((int(hf.vision_config.depth),), drop_first_token=False)

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return the patches of images of any size and of videos."""
        return self.plan(hf, qwen_tower(hf.vision_config), self.whole_model, processing)

    def video_placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the token that stands for a video in text."""
        return str(tokenizer.special_tokens_map.get("video_token", "<|video_pad|>"))

    def pixel_shape(self, hf: PretrainedConfig) -> tuple[int, ...]:
        """Return the number of values in a flattened patch, as a shape."""
        return (qwen_tower(hf.vision_config).patch_dim(hf.vision_config),)

    def placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the token that stands for an image in text."""
        return str(tokenizer.special_tokens_map.get("image_token", "<|image_pad|>"))

    def connector_products(self, hf: PretrainedConfig, work: MediaWork) -> list[int]:
        """Return the FLOPs of the mergers' products with weights."""
        width = qwen_tower(hf.vision_config).hidden_size(hf.vision_config) * len(self.features(hf).layers)
        return self.connector(hf).products(hf, input_size=width, num_features=work.num_patches)

    def connector_rows(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return how many squares of patches the merger reads."""
        return work.num_patches // qwen_tower(hf.vision_config).merged(hf.vision_config)


class Qwen25Vl(Qwen2Vl):
    """Qwen2_5_VLForConditionalGeneration."""

    config_class = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLForConditionalGeneration
    fields: ClassVar[Fields] = Qwen25VlTower.fields
    towers = Qwen25VlTower.model_types
    texts = ("qwen2_5_vl_text",)
    whole_model: ClassVar[type[PreTrainedModel]] = Qwen2_5_VLModel
    plan = TimedPlan

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the merger."""
        return PatchMerger(_MERGER, "RMSNorm", out_size_key="out_hidden_size")


class Qwen3Vl(Qwen2Vl):
    """Qwen3VLForConditionalGeneration."""

    config_class = Qwen3VLConfig
    model_class = Qwen3VLForConditionalGeneration
    names: ClassVar[KnownNames] = replace(_NAMES, styles=(_NEW,))
    fields: ClassVar[Fields] = Qwen3VlTower.fields
    towers = Qwen3VlTower.model_types
    texts = ("qwen3_vl_text",)
    whole_model: ClassVar[type[PreTrainedModel]] = Qwen3VLModel
    plan = TimestampPlan

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the mergers: of the last layer, and of those whose features are added in the language model."""
        return PatchMerger(
            _NEW_MERGER,
            "LayerNorm",
            out_size_key="out_hidden_size",
            num_inner=len(hf.vision_config.deepstack_visual_indexes),
        )

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the outputs of the layers of deepstack_visual_indexes and of the last one.

        Raises:
            ConversionError: layers out of order, twice, or that the tower does not have.
        """
        vision = hf.vision_config
        inner, depth = [int(i) for i in vision.deepstack_visual_indexes], int(vision.depth)
        if inner != sorted(set(inner)) or not all(0 <= i < depth - 1 for i in inner):
            raise ConversionError(
                f"vision_config.deepstack_visual_indexes = {inner}: expected layers from 0 to {depth - 2}, in order"
            )
        return FeatureChoice((*(i + 1 for i in inner), depth), drop_first_token=False)

    def num_deepstack(self, hf: PretrainedConfig) -> int:
        """Return how many inner layers of the tower have features of their own."""
        return len(hf.vision_config.deepstack_visual_indexes)


class Qwen3VlMoe(Qwen3Vl):
    """Qwen3VLMoeForConditionalGeneration."""

    config_class = Qwen3VLMoeConfig
    model_class = Qwen3VLMoeForConditionalGeneration
    fields: ClassVar[Fields] = Qwen3VlMoeTower.fields
    towers = Qwen3VlMoeTower.model_types
    texts = ("qwen3_vl_moe_text",)
    whole_model: ClassVar[type[PreTrainedModel]] = Qwen3VLMoeModel


class Qwen35(Qwen2Vl):
    """Qwen3_5ForConditionalGeneration."""

    config_class = Qwen3_5Config
    model_class = Qwen3_5ForConditionalGeneration
    names: ClassVar[KnownNames] = replace(_NAMES, styles=(_NEW,), carried=("mtp.",))
    fields: ClassVar[Fields] = Qwen35Tower.fields
    towers = Qwen35Tower.model_types
    texts = ("qwen3_5_text",)
    whole_model: ClassVar[type[PreTrainedModel]] = Qwen3_5Model
    plan = TimestampPlan

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the merger."""
        return PatchMerger(_NEW_MERGER, "LayerNorm", out_size_key="out_hidden_size")


class Qwen35Moe(Qwen35):
    """Qwen3_5MoeForConditionalGeneration."""

    config_class = Qwen3_5MoeConfig
    model_class = Qwen3_5MoeForConditionalGeneration
    fields: ClassVar[Fields] = Qwen35MoeTower.fields
    towers = Qwen35MoeTower.model_types
    texts = ("qwen3_5_moe_text",)
    whole_model: ClassVar[type[PreTrainedModel]] = Qwen3_5MoeModel
