"""Parts of decoder layers that are missing in megatron-core.

s: tokens, b: samples, h: hidden size, d: rotated dims of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from llava_mcore.models.norms import TorchNorm


class NormedRowParallelLinear(RowParallelLinear):
    """A row-parallel layer without bias whose output is normalized after the sum over ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = TorchNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Return [s, b, h] of [s, b, features / tp]; [s / tp, b, h] with sequence parallelism."""
        output, bias = super().forward(input_)
        assert bias is None
        return self.post_layernorm(output), None


class TwoRopeSelfAttention(SelfAttention):
    """Attention that may have its own rotary positions instead of those of all layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_rope: RotaryEmbedding | None = None
        self.local_angles: Tensor | None = None
        """Angles [s, 1, 1, d] of tokens whose positions are not 0, 1, …, by the layer's own frequencies."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """Take `rotary_pos_emb` [s, 1, 1, d] from the layer's own frequencies if it has them."""
        shared = kwargs.pop("rotary_pos_emb", None)
        if self.local_rope is not None and isinstance(shared, torch.Tensor):
            # megatron-core takes a rank's part of the angles of rows at once, of packed samples in each layer.
            is_packed = kwargs.get("packed_seq_params") is not None
            length = shared.shape[0] * (1 if is_packed else self.config.context_parallel_size)
            angles = self.local_rope(length, packed_seq=is_packed) if self.local_angles is None else self.local_angles
            shared = angles
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=shared, **kwargs)


class DeepstackLayer(TransformerLayer):
    """A layer after which features of the tower's inner layers are added (DeepStack, arXiv 2406.04334).

    They come as `context`, which megatron-core hands to every layer and through recomputation: the first layer adds the
    first of them, and so on.
    """

    def forward(self, *args: Any, context: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [s, b, h] ([s / tp, b, h] with sequence parallelism), and `context` as it came.

        Args:
            context: [k, s, b, h], zero for tokens of text; None beyond the first stage.
        """
        hidden_states, _ = super().forward(*args, context=None, **kwargs)
        return self.add_features(hidden_states, context), context

    def add_features(self, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        """Return the layer's own output with its features, arguments as for `forward`."""
        if context is None or self.layer_number > len(context):
            return hidden_states
        return hidden_states + context[self.layer_number - 1]


def column_linear(config: TransformerConfig, inputs: int, outputs: int) -> ColumnParallelLinear:
    """Return a layer of which each tensor-parallel rank computes a part of the outputs."""
    return ColumnParallelLinear(
        inputs, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False
    )


def row_linear(config: TransformerConfig, inputs: int, outputs: int) -> RowParallelLinear:
    """Return a layer that reads such parts, and whose output is the sum over ranks."""
    return RowParallelLinear(
        inputs,
        outputs,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
