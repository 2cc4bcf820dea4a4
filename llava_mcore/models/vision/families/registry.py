"""The families of towers that are known, of vision and audio. A new one is a file and a line here."""

from __future__ import annotations

from transformers import PretrainedConfig

from llava_mcore.models.audio.qwen2_audio import Qwen2AudioTower
from llava_mcore.models.vision.families.base import TileTower, VisionFamily
from llava_mcore.models.vision.families.clip import Clip
from llava_mcore.models.vision.families.dinov2 import Dinov2
from llava_mcore.models.vision.families.idefics import Idefics2Siglip, IdeficsSiglip
from llava_mcore.models.vision.families.internvit import InternVit
from llava_mcore.models.vision.families.mllama import MllamaTower
from llava_mcore.models.vision.families.qwen import (
    Qwen2VlTower,
    Qwen3VlMoeTower,
    Qwen3VlTower,
    Qwen25VlTower,
    Qwen35MoeTower,
    Qwen35Tower,
    QwenTower,
)
from llava_mcore.models.vision.families.siglip import Siglip

_FAMILIES: tuple[VisionFamily, ...] = (
    *(Clip(), Dinov2(), IdeficsSiglip(), InternVit(), Siglip()),
    *(Idefics2Siglip(), Qwen2VlTower(), Qwen25VlTower(), Qwen3VlTower(), Qwen3VlMoeTower(), Qwen35Tower()),
    *(Qwen35MoeTower(), Qwen2AudioTower(), MllamaTower()),
)
VISION_FAMILIES: dict[str, VisionFamily] = {name: family for family in _FAMILIES for name in family.model_types}
"""By model_type."""
REASONS = {
    "siglip2_vision_model": "it takes patches of any aspect ratio with their shapes (NaFlex), LLaVA passes square "
    "images; take a fixed-resolution SigLIP 2, which is a siglip_vision_model",
}
"""Why a model_type that people try is not known."""


def towers_of_any_class() -> tuple[str, ...]:
    """Return the model_types of the towers that a class with AutoModel reads."""
    return tuple(name for name, family in VISION_FAMILIES.items() if not family.part_of_a_class)


def vision_family(hf: PretrainedConfig) -> VisionFamily:
    """Return the family of a vision config. `load_hf_config` has seen that it is known."""
    return VISION_FAMILIES[hf.model_type]


def tile_tower(hf: PretrainedConfig) -> TileTower:
    """As `vision_family`, of a tower that takes images of one size."""
    family = vision_family(hf)
    assert isinstance(family, TileTower), f"{hf.model_type} takes images of any size"
    return family


def qwen_tower(hf: PretrainedConfig) -> QwenTower:
    """As `vision_family`, of a tower of Qwen-VL's."""
    family = vision_family(hf)
    assert isinstance(family, QwenTower), f"{hf.model_type} is not a tower of Qwen-VL's"
    return family
