"""The sizes of a model that determine its possible layouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDims:
    """Sizes from a Hugging Face config.

    `num_query_groups` is the number of key/value heads. `vision_num_layers` counts all layers of the tower,
    including those after the feature layer. `sliding_window` is None if every token sees all earlier ones.
    `num_deepstack`: features of inner layers of the tower, one added after each of the first decoder layers.
    `keeps_class_token`: the tower has one, and the language model sees it. `projection_ffn_hidden_size`: the width
    between the matrices of what maps the tower's features, 0 if there is none. `delta_key_heads`, `delta_value_heads`:
    of the layers that have a gated delta net in place of attention, 0 if there are none; `delta_width`: rows of the
    first matrix of such a net. `num_experts`: of the layers that have a mixture in place of an MLP, 0 if there are
    none; `expert_ffn_hidden_size`, `shared_ffn_hidden_size`: the width inside one of them, and inside what all tokens
    share. `num_cross_layers`: layers that attend to images in place of tokens.
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
