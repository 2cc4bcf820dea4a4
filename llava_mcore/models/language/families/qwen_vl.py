"""The decoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2's and Qwen3's with positions of time, height and width."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from llava_mcore.models.language.families.qwen2 import Qwen2
from llava_mcore.models.language.families.qwen3 import Qwen3
from llava_mcore.models.language.shape import DecoderShape, mrope_from_hf


class Qwen2VlText(Qwen2):
    """Qwen2 with M-RoPE."""

    model_types = ("qwen2_vl_text",)
    part_of_a_class = True

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return what TransformerConfig does not say."""
        return DecoderShape(mrope_from_hf(hf, Qwen2VLRotaryEmbedding))


class Qwen25VlText(Qwen2VlText):
    """Qwen2.5 with M-RoPE."""

    model_types = ("qwen2_5_vl_text",)

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return what TransformerConfig does not say."""
        return DecoderShape(mrope_from_hf(hf, Qwen2_5_VLRotaryEmbedding))


class Qwen3VlText(Qwen3):
    """Qwen3 with interleaved M-RoPE, and features of the tower's inner layers after its first layers."""

    model_types = ("qwen3_vl_text",)
    part_of_a_class = True

    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return what TransformerConfig does not say."""
        return replace(super().shape(hf), rope=mrope_from_hf(hf, Qwen3VLTextRotaryEmbedding), deepstack=True)
