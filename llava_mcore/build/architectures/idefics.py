"""The common part of Idefics2, Idefics3 and SmolVLM: their tower is a SigLIP without pooling head."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from llava_mcore.build.architectures.base import FolderClass
from llava_mcore.build.language import TokenIds
from llava_mcore.build.options import BuildOptions
from llava_mcore.build.vision import FeatureShape
from llava_mcore.errors import ConfigError

_TOWER = "siglip_vision_model"
_SHARED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size"),
    *("patch_size", "hidden_act", "layer_norm_eps", "attention_dropout"),
)
"""Settings that SigLIP's configuration shares with those of the classes' towers."""


class IdeficsFolder(FolderClass):
    """A class with a SigLIP, which the connector reads after its last norm."""

    vision_class: ClassVar[type[PretrainedConfig]]
    """Configuration of the class's tower."""
    layers = (-1,)
    parts = ("vision_model", "connector", "text_model")

    def require_tower(self, vision: PretrainedConfig, options: BuildOptions) -> None:
        """Raise ConfigError for a tower other than SigLIP, and for settings that the class does not have."""
        if vision.model_type != _TOWER:
            raise ConfigError(
                f"the tower of {self.model_class.__name__} is a SigLIP ({_TOWER}), but --vision-model "
                f"{options.vision_model} is {vision.model_type!r}: give a SigLIP, or another --architecture"
            )
        if options.expand_projector or options.vision_feature_layers not in (None, self.layers):
            raise ConfigError(
                f"{self.model_class.__name__} reads the tower's last layer: omit --expand-projector and "
                "--vision-feature-layer"
            )

    def config(
        self, text: PretrainedConfig, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds
    ) -> PretrainedConfig:
        """Return the configuration of the whole model, in which SigLIP's has the name that the class gives it."""
        return self.model_class.config_class(
            text_config=text,
            vision_config=self.vision_class(**{name: getattr(vision, name) for name in _SHARED}),
            image_token_id=ids.image,
            tie_word_embeddings=text.tie_word_embeddings,
            **self._connector_fields(text),
        )

    def _connector_fields(self, text: PretrainedConfig) -> dict[str, Any]:
        """Return the fields of the configuration that describe the connector; empty: the class's defaults."""
        return {}

    def _config_fields(self, vision: PretrainedConfig, plan: FeatureShape, ids: TokenIds) -> dict[str, Any]:
        return {}

    def place(self, model: PreTrainedModel, language: PreTrainedModel, vision: PreTrainedModel) -> None:
        """Put the source's modules into a model without memory; the tower without its pooling head."""
        model.model.text_model = language.model
        model.lm_head = language.lm_head
        used = {name: x for name, x in vision.state_dict().items() if not name.startswith("head.")}
        model.model.vision_model.load_state_dict(used, assign=True)

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the model's tensors by their names in files, which are those of the modules."""
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        return {name: x for name, x in model.state_dict().items() if name not in tied}
