"""The sizes of a model that determine its possible layouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDims:
    """Sizes from a Hugging Face config. A size is 0 if the model has no such part.

    Attributes:
        num_query_groups: key/value heads.
        vision_num_layers: all layers of the tower, including those after the feature layer.
        sliding_window: None if every token attends to all earlier ones.
        keeps_class_token: the tower has a class token, and the language model sees it.
        projection_ffn_hidden_size: width between the projection's matrices.
        num_deepstack: inner layers of the tower whose features are added, one after each of the first decoder layers.
        delta_key_heads, delta_value_heads: heads of the layers with a gated delta net instead of attention.
        delta_width: rows of a delta net's first matrix.
        num_experts: experts of a layer with a mixture of experts instead of an MLP.
        expert_ffn_hidden_size, shared_ffn_hidden_size: width of an expert, and of the shared expert.
        num_cross_layers: layers that attend to images instead of tokens.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    vision_num_layers: int
    vision_hidden_size: int
    vision_ffn_hidden_size: int
    vision_num_attention_heads: int
    max_position_embeddings: int
    sliding_window: int | None
    keeps_class_token: bool = False
    projection_ffn_hidden_size: int = 0
    num_deepstack: int = 0
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_width: int = 0
    num_experts: int = 0
    expert_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    num_cross_layers: int = 0

    @property
    def num_deepstack_layers(self) -> int:
        """Return the number of decoder layers after which features are added: in a short model not all are."""
        return min(self.num_deepstack, self.num_layers)
