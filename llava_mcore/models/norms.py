"""torch's norms for megatron-core's local layers; unlike megatron-core's wrapper, also with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm whose weight is the distance from 1, in fp32 inside, as Gemma's: x / rms(x) * (1 + weight)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., hidden_size] normalized, in its own dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class TorchNorm(WrappedTorchNorm):
    """Builds torch's LayerNorm or RMSNorm, or a zero-centered RMSNorm, as the configuration says.

    With sequence parallelism every rank normalizes its own tokens only, so its weights' gradients are shares of a sum.
    They only need the mark by which megatron-core's gradient finalization finds them.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return the norm itself. `_`: arguments that only other back ends use."""
        kinds: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        kind = ZeroCentredRMSNorm if config.layernorm_zero_centered_gamma else kinds[config.normalization]
        norm: Any = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
