"""The families of vision towers that are known. A new one is a file and a line here."""

from __future__ import annotations

from transformers import PretrainedConfig

from llava_mcore.models.vision.clip import Clip
from llava_mcore.models.vision.dinov2 import Dinov2
from llava_mcore.models.vision.family import VisionFamily
from llava_mcore.models.vision.idefics import IdeficsSiglip
from llava_mcore.models.vision.internvit import InternVit
from llava_mcore.models.vision.siglip import Siglip

_FAMILIES: tuple[VisionFamily, ...] = (Clip(), Dinov2(), IdeficsSiglip(), InternVit(), Siglip())
VISION_FAMILIES: dict[str, VisionFamily] = {name: family for family in _FAMILIES for name in family.model_types}
"""By model_type."""
REASONS = {
    "siglip2_vision_model": "it takes patches of any aspect ratio with their shapes (NaFlex), LLaVA passes square "
    "pictures; take a fixed-resolution SigLIP 2, which is a siglip_vision_model",
}
"""Why a model_type that people try is not known."""


def towers_of_any_class() -> tuple[str, ...]:
    """Return the model_types of the towers that a class with AutoModel reads."""
    return tuple(name for name, family in VISION_FAMILIES.items() if not family.part_of_a_class)


def vision_family(hf: PretrainedConfig) -> VisionFamily:
    """Return the family of a vision config. `load_hf_config` has seen that it is known."""
    return VISION_FAMILIES[hf.model_type]
