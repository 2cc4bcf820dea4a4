"""Where the parts of a LLaVA live, on the Megatron side and in Hugging Face files.

transformers has renamed LLaVA's tensors several times; the files of every version are read, and written back
under the names they had.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llava_mcore.errors import ConversionError, problems
from llava_mcore.models.vision.geometry import WRAPPED

# Longest first: the first prefix that some tensor has is taken.
_VISION = ("model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower.vision_model.", "vision_tower.")
_PROJECTION = ("model.multi_modal_projector.", "multi_modal_projector.")
_TEXT = ("model.language_model.", "language_model.model.")
_LM_HEAD = ("language_model.lm_head.weight", "lm_head.weight")
_LM_HEAD_OF = {"model.language_model.": "lm_head.weight", "language_model.model.": "language_model.lm_head.weight"}


@dataclass(frozen=True)
class TextNames:
    """Prefixes of the language model on both sides, and the HF name of its output layer."""

    megatron: str
    hf: str
    lm_head: str

    @property
    def megatron_layer(self) -> str:
        return self.megatron + "decoder.layers.{layer}."

    @property
    def hf_layer(self) -> str:
        return self.hf + "layers.{layer}."


@dataclass(frozen=True)
class LayerNames:
    """Hugging Face's names of the modules in one layer, relative to it.

    `query_key_value` and `into` (the gate first, where there is one) hold one name where the files have them fused.
    """

    norm_before: str
    query_key_value: tuple[str, ...]
    attention_out: str
    norm_between: str
    into: tuple[str, ...]
    out_of: str
    norm_after_attention: str | None = None
    norm_after_mlp: str | None = None


@dataclass(frozen=True)
class HfNames:
    """The prefixes one HF folder uses."""

    vision: str
    projection: str
    text: str
    lm_head: str


def usual_names(vision_kind: str) -> HfNames:
    """Return the prefixes of llava-hf's checkpoints. `vision_kind`: the tower's model_type."""
    vision = "vision_tower.vision_model." if vision_kind in WRAPPED else "vision_tower."
    return HfNames(vision, "multi_modal_projector.", "language_model.model.", "language_model.lm_head.weight")


def detect_names(hf_tensors: Iterable[str], *, source: str) -> HfNames:
    """Find the prefixes that an HF folder's tensors have.

    Raises:
        ConversionError: a part is missing altogether; lists the prefixes that were looked for.
    """
    names = list(hf_tensors)
    missing: list[str] = []

    def first(part: str, prefixes: tuple[str, ...]) -> str:
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in names):
                return prefix
        missing.append(f"no {part}: no tensor starts with {' or '.join(prefixes)}")
        return prefixes[-1]

    vision, projection, text = (
        first("vision tower", _VISION),
        first("projector", _PROJECTION),
        first("language model", _TEXT),
    )
    if missing:
        raise ConversionError(problems(f"{source} holds no whole LLaVA model", missing))
    lm_head = next((name for name in _LM_HEAD if name in names), _LM_HEAD_OF[text])
    return HfNames(vision, projection, text, lm_head)
