"""The families that can be combined: every vision tower with every language model. A new one is one line here."""

from __future__ import annotations

from types import ModuleType

from transformers import LlavaConfig

from llava_mcore.errors import ConversionError, problems
from llava_mcore.models.language import gemma2, gemma3, llama, phi3, qwen2, qwen3
from llava_mcore.models.vision import clip, dinov2, internvit, siglip

LANGUAGE_MODELS: dict[str, ModuleType] = {
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "llama": llama,
    "mistral": llama,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
VISION_TOWERS: dict[str, ModuleType] = {
    "clip_vision_model": clip,
    "dinov2": dinov2,
    "dinov2_with_registers": dinov2,
    "internvl_vision": internvit,
    "siglip_vision_model": siglip,
}
_REASONS = {
    "siglip2_vision_model": "it takes patches of any aspect ratio with their shapes (NaFlex), LLaVA passes square "
    "pictures; take a fixed-resolution SigLIP 2, which is a siglip_vision_model",
    "gemma3": "it is a whole vision-language model; its text model is gemma3_text",
}


def check_families(hf: LlavaConfig, *, source: str) -> None:
    """Raise ConversionError when a part of the model is of a family that is not known."""
    found = []
    for key, kind, known in (
        ("text_config", hf.text_config.model_type, LANGUAGE_MODELS),
        ("vision_config", hf.vision_config.model_type, VISION_TOWERS),
    ):
        if kind not in known:
            reason = f": {_REASONS[kind]}" if kind in _REASONS else ""
            found.append(f"{key}.model_type = {kind!r} is not supported{reason}; known: {', '.join(sorted(known))}")
    if found:
        raise ConversionError(problems(f"{source}/config.json", found))


def language_part(hf: LlavaConfig) -> ModuleType:
    """Return the file of the language model's family."""
    return LANGUAGE_MODELS[hf.text_config.model_type]


def vision_part(hf: LlavaConfig) -> ModuleType:
    """Return the file of the vision tower's family."""
    return VISION_TOWERS[hf.vision_config.model_type]
