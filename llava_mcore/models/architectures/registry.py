"""The architectures of the register (config/model_classes.py), and what depends on the class alone."""

from __future__ import annotations

from transformers import PretrainedConfig

from llava_mcore.config.model_classes import MODEL_CLASSES, instance
from llava_mcore.models.architectures.base import Architecture, TileArchitecture

ARCHITECTURES: dict[str, Architecture] = {
    model_type: instance("llava_mcore.models.architectures", row.architecture)
    for model_type, row in MODEL_CLASSES.items()
}
"""By model_type."""


def architecture_of(hf: PretrainedConfig) -> Architecture:
    """Return the architecture of a whole model's config. `load_hf_config` has checked that it is known."""
    return ARCHITECTURES[hf.model_type]


def tower_config(hf: PretrainedConfig) -> PretrainedConfig:
    """Return the tower's section of a whole model's config."""
    section: PretrainedConfig = getattr(hf, architecture_of(hf).tower_section)
    return section


def ties_embeddings(hf: PretrainedConfig) -> bool:
    """Return whether the output layer of a whole model has the weight of its embedding."""
    return architecture_of(hf).ties_embeddings(hf)


def tile_architecture(hf: PretrainedConfig) -> TileArchitecture:
    """As `architecture_of`, of a class whose tower takes images of one size."""
    architecture = architecture_of(hf)
    assert isinstance(architecture, TileArchitecture), f"{hf.model_type} takes images of any size"
    return architecture


def features_per_tile(hf: PretrainedConfig) -> int:
    """Return the number of features per tile that reach the language model."""
    return tile_architecture(hf).features_per_tile(hf)


def classes_that_take_videos() -> tuple[str, ...]:
    """Return the names of the Hugging Face classes whose samples may have videos."""
    return tuple(x.model_class.__name__ for x in ARCHITECTURES.values() if x.takes_videos)


def classes_that_take_audios() -> tuple[str, ...]:
    """Return the names of the Hugging Face classes whose samples may have audio."""
    return tuple(x.model_class.__name__ for x in ARCHITECTURES.values() if x.takes_audios)
