"""The known families of language models. A new one needs a file and a line here."""

from __future__ import annotations

from transformers import PretrainedConfig

from llava_mcore.models.language.families.base import LanguageFamily
from llava_mcore.models.language.families.gemma2 import Gemma2
from llava_mcore.models.language.families.gemma3 import Gemma3
from llava_mcore.models.language.families.llama import Llama
from llava_mcore.models.language.families.mllama import MllamaText
from llava_mcore.models.language.families.phi3 import Phi3
from llava_mcore.models.language.families.qwen2 import Qwen2
from llava_mcore.models.language.families.qwen3 import Qwen3
from llava_mcore.models.language.families.qwen3_5 import Qwen35Text
from llava_mcore.models.language.families.qwen3_5_moe import Qwen35MoeText
from llava_mcore.models.language.families.qwen3_moe import Qwen3Moe, Qwen3VlMoeText
from llava_mcore.models.language.families.qwen_vl import Qwen2VlText, Qwen3VlText, Qwen25VlText

_FAMILIES: tuple[LanguageFamily, ...] = (
    *(Gemma2(), Gemma3(), Llama(), Phi3(), Qwen2(), Qwen3(), Qwen3Moe()),
    MllamaText(),
    *(Qwen2VlText(), Qwen25VlText(), Qwen3VlText(), Qwen3VlMoeText(), Qwen35Text(), Qwen35MoeText()),
)
LANGUAGE_FAMILIES: dict[str, LanguageFamily] = {name: family for family in _FAMILIES for name in family.model_types}
"""By model_type."""
REASONS = {"gemma3": "it is a whole vision-language model; its text model is gemma3_text"}
"""Hints for unknown model_types that people try."""


def texts_of_any_class() -> tuple[str, ...]:
    """Return the model_types of the decoders that a class with AutoModel reads."""
    return tuple(name for name, family in LANGUAGE_FAMILIES.items() if not family.part_of_a_class)


def language_family(hf: PretrainedConfig) -> LanguageFamily:
    """Return the family of a text config. `load_hf_config` has checked that it is known."""
    return LANGUAGE_FAMILIES[hf.model_type]


def embedding_rows(hf: PretrainedConfig) -> int:
    """Return the tokens of a whole model that have an embedding, without padding."""
    return language_family(hf.text_config).embedding_rows(hf.text_config)


def limiting_window(text: PretrainedConfig) -> int | None:
    """Return the longest sequence that is computed as in Hugging Face: a sliding window that the family does not
    compute. None: any."""
    values = text.to_dict()
    if language_family(text).computes_windows or not values.get("use_sliding_window", True):
        return None
    window: int | None = values.get("sliding_window")
    return window
