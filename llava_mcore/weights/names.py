"""Names of the parts of a model, on the Megatron side and in Hugging Face files.

transformers has renamed tensors several times; the files of every version are read, and written back under the names
they had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from llava_mcore.errors import ConversionError, problems


class HasShape(Protocol):
    """A tensor of a folder, or its description in the header."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class TextNames:
    """Prefixes of the language model on both sides, and the HF names of its embedding and output layer.

    `tensors`: those of the folder, whose names and shapes tell which of several forms it has; empty for the usual one.
    """

    megatron: str
    hf: str
    embedding: str
    lm_head: str
    tensors: Mapping[str, HasShape] = field(default_factory=dict)

    @property
    def megatron_layer(self) -> str:
        return self.megatron + "decoder.layers.{layer}."

    @property
    def hf_layer(self) -> str:
        return self.hf + "layers.{layer}."


@dataclass(frozen=True)
class LayerNames:
    """Hugging Face's names of the modules in one layer, relative to it.

    `query_key_value` and `into` (the gate first, where there is one) have one name if they are fused in the files.
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
    """The prefixes of one HF folder, and the names of the output layer and the newline (empty if there is none)."""

    vision: str
    projection: str
    text: str
    lm_head: str
    newline: str = ""

    @property
    def embedding(self) -> str:
        """Return the name of the embedding."""
        return f"{self.text}embed_tokens.weight"


@dataclass(frozen=True)
class KnownNames:
    """All names of one class's tensors in files.

    `vision`, `projection`, `text`: prefixes, longest first, because the first match is used. `lm_head`:
    the output layer's name by the language model's prefix. `styles`: complete sets of names that a user may use in a
    pattern; the first is that of the class's common files. `newline`: names of the vector after rows of features, if
    any. `carried`: prefixes of tensors that transformers' model does not have: an import keeps them, and an export
    writes them back.
    """

    vision: tuple[str, ...]
    projection: tuple[str, ...]
    text: tuple[str, ...]
    lm_head: Mapping[str, str]
    styles: tuple[HfNames, ...]
    newline: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()

    @classmethod
    def single(cls, style: HfNames) -> KnownNames:
        """Return the names of a class whose files have only ever had one style."""
        lm_head = {style.text: style.lm_head}
        return cls((style.vision,), (style.projection,), (style.text,), lm_head, styles=(style,))

    def usual(self, *, wrapped: bool) -> HfNames:
        """Return the names of the class's common files. `wrapped`: see `VisionFamily`."""
        names = self.styles[0]
        return replace(names, vision=names.vision + "vision_model.") if wrapped else names

    def detect(self, hf_tensors: Iterable[str], *, source: str) -> HfNames:
        """Find the prefixes that an HF folder's tensors have.

        Raises:
            ConversionError: a part is missing; lists the prefixes.
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
            first("vision tower", self.vision),
            first("projector", self.projection),
            first("language model", self.text),
        )
        newline = next((name for name in self.newline if name in names), "")
        if self.newline and not newline:
            missing.append(f"no newline: no tensor is {' or '.join(self.newline)}")
        if missing:
            raise ConversionError(problems(f"{source} does not contain a complete model", missing))
        lm_head = next((name for name in dict.fromkeys(self.lm_head.values()) if name in names), self.lm_head[text])
        return HfNames(vision, projection, text, lm_head, newline)


FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Name of a separate norm, with torch's layers -> its name in checkpoints."""
FUSED_DELTA_NORM = ("input_layernorm.", "self_attention.in_proj.layer_norm_")
"""The first of these names, and the second in layers that have a delta net in place of attention."""
