"""torch's norms for megatron-core's local layers; unlike megatron-core's wrapper, also with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm(WrappedTorchNorm):
    """Builds torch's LayerNorm or RMSNorm, as the configuration says.

    With sequence parallelism every rank normalises its own tokens only, so its weights' gradients are shares of a sum.
    All that takes is the mark by which megatron-core's gradient finalisation finds them.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return the norm itself. `_`: arguments that only other back ends use."""
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
