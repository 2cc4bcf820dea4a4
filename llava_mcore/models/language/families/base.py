"""The interface of a language model family: one file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from transformers import PretrainedConfig

from llava_mcore.models.language.families.dense import head_dim
from llava_mcore.models.language.shape import DecoderShape
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.table import Entry


class LanguageFamily(ABC):
    """The decoders of some Hugging Face model_types."""

    model_types: ClassVar[tuple[str, ...]]
    part_of_a_class: ClassVar[bool] = False
    """Whether only the Hugging Face classes that name it have such a decoder."""
    computes_windows: ClassVar[bool] = False
    """Whether sliding windows are supported; otherwise sequences must not be longer than the window."""

    def delta_dims(self, hf: PretrainedConfig) -> dict[str, int]:
        """Return the fields of ModelDims about gated delta nets; empty if there are none."""
        return {}

    def ffn_size(self, hf: PretrainedConfig) -> int:
        """Return the width inside an MLP, 0 if all layers have mixtures of experts."""
        return int(hf.intermediate_size)

    def expert_dims(self, hf: PretrainedConfig) -> dict[str, int]:
        """Return the fields of ModelDims about mixtures of experts; empty if there are none."""
        return {}

    def inactive_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights in all layers that one token does not use: those of experts not chosen."""
        return 0

    def embedding_rows(self, hf: PretrainedConfig) -> int:
        """Return the tokens that have an embedding: at least those that the output layer predicts."""
        return int(hf.vocab_size)

    @abstractmethod
    def config_from_hf(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Return megatron-core TransformerConfig fields. Raises ConversionError for unsupported settings."""

    @abstractmethod
    def shape(self, hf: PretrainedConfig) -> DecoderShape:
        """Return settings that TransformerConfig does not have."""

    @abstractmethod
    def weight_entries(self, hf: PretrainedConfig, names: TextNames) -> list[Entry]:
        """Return the entries of all layers."""

    def layer_weights(self, hf: PretrainedConfig) -> int:
        """Return the number of weights that a token meets in the matrices of all layers: queries, keys, values, output,
        gated MLP."""
        heads, groups = hf.num_attention_heads, hf.num_key_value_heads
        attention = hf.hidden_size * head_dim(hf) * (2 * heads + 2 * groups)
        return int(hf.num_hidden_layers * (attention + 3 * hf.hidden_size * hf.intermediate_size))

    def attention_products(self, hf: PretrainedConfig, *, num_tokens: int, num_pairs: int) -> int:
        """Return the FLOPs of all layers' products of two activations, in the forward pass (see `flops.Workload`)."""
        return int(4 * num_pairs * hf.num_hidden_layers * hf.num_attention_heads * head_dim(hf))
