"""LLaVA-1.5: every image is one square tile; its features go through an MLP."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlavaConfig, LlavaForConditionalGeneration, PretrainedConfig

from llava_mcore.media.media import MediaPlan, Processing, SameTokens
from llava_mcore.models.architectures.base import TileArchitecture
from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.connectors.mlp import Mlp
from llava_mcore.models.vision.features import FeatureChoice, feature_choice, num_patches
from llava_mcore.weights.names import HfNames, KnownNames

NAMES = KnownNames(
    vision=(
        "model.vision_tower.vision_model.",
        "model.vision_tower.",
        "vision_tower.vision_model.",
        "vision_tower.",
    ),
    projection=("model.multi_modal_projector.", "multi_modal_projector."),
    text=("model.language_model.", "language_model.model."),
    lm_head={
        "language_model.model.": "language_model.lm_head.weight",
        "model.language_model.": "lm_head.weight",
    },
    styles=(
        HfNames("vision_tower.", "multi_modal_projector.", "language_model.model.", "language_model.lm_head.weight"),
        HfNames("model.vision_tower.", "model.multi_modal_projector.", "model.language_model.", "lm_head.weight"),
        HfNames("vision_tower.vision_model.", "multi_modal_projector.", "model.language_model.", "lm_head.weight"),
    ),
)


class Llava(TileArchitecture):
    """LlavaForConditionalGeneration."""

    config_class = LlavaConfig
    model_class = LlavaForConditionalGeneration
    names: ClassVar[KnownNames] = NAMES

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the MLP, the only connector of the class."""
        return Mlp()

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the features of vision_feature_layer and vision_feature_select_strategy."""
        return feature_choice(hf)

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return one tile and a fixed number of placeholders for every image."""
        return SameTokens(hf.image_token_id, self.features_per_tile(hf), num_patches(hf.vision_config))
