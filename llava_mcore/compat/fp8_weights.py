"""Frozen matrices of Transformer Engine's layers (2.20) that exist in FP8 only.

Its layers multiply by a weight that is an FP8 tensor as it is, and make no copies of it in FP8.
"""

from __future__ import annotations

from torch import Tensor, nn

from llava_mcore.compat.required import required

_IN_FP8 = "llava_mcore_weight_in_fp8"


def keep_in_fp8(layer: nn.Module) -> None:
    """Replace a layer's frozen matrix by its FP8 form (e4m3, one scale) and the transpose of that, for both passes.

    Raises:
        AttributeError: not one of Transformer Engine's layers with one matrix.
    """
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer  # on GPUs only
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    if not isinstance(layer, TransformerEngineBaseModule) or required(layer, "weight_names") != ["weight"]:
        raise AttributeError(f"expected one of Transformer Engine's linear layers, found a {type(layer).__qualname__}")
    weight = required(layer, "weight")
    assert isinstance(weight, Tensor) and not weight.requires_grad
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, weight.device)
    layer.register_parameter("weight", nn.Parameter(quantizer(weight.detach()), requires_grad=False))
    vars(layer)[_IN_FP8] = True


def is_in_fp8(layer: nn.Module) -> bool:
    """Return whether a layer's matrix exists in FP8 only."""
    return _IN_FP8 in vars(layer)
