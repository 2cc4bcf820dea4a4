"""Differences between decoder families beyond megatron-core's TransformerConfig."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llava_mcore.errors import ConversionError
from llava_mcore.weights.names import LayerNames

# Frequencies that depend on the sequence length (dynamic, longrope) have no fixed table.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


USUAL_NAMES = LayerNames(
    norm_before="input_layernorm",
    query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.o_proj",
    norm_between="post_attention_layernorm",
    into=("mlp.gate_proj", "mlp.up_proj"),
    out_of="mlp.down_proj",
)


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies [rotated dims / 2] of a head, and the factor of its cosines and sines (YaRN).

    `axes`: int64 [rotated dims / 2], for positions along several axes: which one each frequency is multiplied by.
    """

    inv_freq: Tensor
    scaling: float
    axes: Tensor | None = None

    def fusion_fields(self, head_dim: int) -> dict[str, Any]:
        """Return TransformerConfig fields for fused rotary kernels.

        The kernels have no factor for cosines and sines. Where whole heads are rotated, the factor scales queries and
        keys alike, so its square becomes part of the softmax's scale. If only a part of each head is rotated, nothing
        is fused.

        Args:
            head_dim: size of an attention head, of which 2 * len(inv_freq) dims are rotated.
        """
        if self.scaling == 1.0:
            return {"apply_rope_fusion": True}
        if 2 * len(self.inv_freq) != head_dim:
            return {"apply_rope_fusion": False}
        return {"apply_rope_fusion": True, "softmax_scale": self.scaling**2 / math.sqrt(head_dim)}

    def factor(self, *, is_fused: bool) -> float:
        """Return the remaining factor of cosines and sines (see `fusion_fields`)."""
        return 1.0 if is_fused else self.scaling


@dataclass(frozen=True)
class DecoderShape:
    """One family's decoder.

    `local_rope`: rotary settings of the layers with a window, if they differ. `embedding_scale`: the factor of token
    embeddings; image features are not scaled. `attention_softcap`: c, where scores x become c * tanh(x / c).
    `post_norms`: outputs of attention and MLP are normalized before they are added to the residual. `deepstack`:
    whether features of the tower's inner layers are added after the first layers. `cross_layers`: those, from 0, that
    attend to the features of images in place of the tokens.
    """

    rope: Rope
    local_rope: Rope | None = None
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    post_norms: bool = False
    deepstack: bool = False
    cross_layers: tuple[int, ...] = ()
    names: LayerNames = USUAL_NAMES

    @property
    def needs_local_layers(self) -> bool:
        """Whether Transformer Engine's layers, as built here, do not support it."""
        differs = self.post_norms or self.attention_softcap is not None or self.local_rope is not None
        return differs or bool(self.cross_layers)


def rope_from_hf(hf: PretrainedConfig, rotary: type[nn.Module] = LlamaRotaryEmbedding) -> Rope:
    """Take the frequencies from Hugging Face's own class, so that every scaling rule has a single source.

    Raises:
        ConversionError: a scaling whose frequencies depend on the sequence length.
    """
    require_fixed_rope(hf.rope_parameters, "text_config.rope_parameters")
    with torch.device("cpu"):  # even if the model is built on the meta device
        embedding = rotary(hf)
    return Rope(embedding.get_buffer("inv_freq").clone(), vars(embedding)["attention_scaling"])


def mrope_from_hf(hf: PretrainedConfig, rotary: type[nn.Module]) -> Rope:
    """As `rope_from_hf`, for positions of time, height and width: which frequencies belong to which axis is found by
    letting Hugging Face's class mix three tensors that hold the number of their axis.

    Raises:
        ConversionError: as `rope_from_hf`, or sections that do not add up to the frequencies.
    """
    rope = rope_from_hf(hf, rotary)
    with torch.device("cpu"):
        embedding = rotary(hf)
    section, half = list(vars(embedding)["mrope_section"]), len(rope.inv_freq)
    if len(section) != 3 or sum(section) != half:
        raise ConversionError(
            f"text_config.rope_parameters.mrope_section = {section}: expected three numbers whose sum is half the head "
            f"size, {half}"
        )
    with torch.device("cpu"):
        # In place in some versions, so that every axis needs memory of its own.
        axes = torch.arange(3.0)[:, None, None, None].repeat(1, 1, 1, half)
        mixed: Tensor = cast(Any, embedding).recomposition_frequencies(axes)
    return replace(rope, axes=mixed[0, 0, :half].long())


def require_fixed_rope(parameters: dict[str, object], key: str) -> None:
    """Raise ConversionError for a kind of rotary scaling that has no fixed table."""
    kind = parameters["rope_type"]
    if kind not in ROPE_TYPES:
        raise ConversionError(f"{key}.rope_type = {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
