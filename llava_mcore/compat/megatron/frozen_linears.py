"""Linear layers with a frozen matrix: kept in another form, or with a bias that is trained.

Transformer Engine's layers (2.20) multiply by a weight that is an FP8 tensor as it is, and make no copies of it in FP8.
megatron-core (0.19.2) multiplies in `_forward_impl`, after it has looked for `weight`; everything else, such as what
crosses ranks, stays as it is. Neither gives a bias its gradient if the matrix is frozen. Import `llava_mcore.parallel`
first, as for megatron.core itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from llava_mcore.compat.required import replace_name, required

MakeMatrix = Callable[[], Tensor]
_IN_FP8 = "llava_mcore_weight_in_fp8"


class _Product(torch.autograd.Function):
    """x W', where W [o, h] is made when it is needed and never kept; no gradient of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: MakeMatrix, group: dist.ProcessGroup | None) -> Tensor:
        ctx.make, ctx.group = make, group
        return torch.matmul(x, make().t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = torch.matmul(gradients[0], ctx.make())
        if ctx.group is not None:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class FrozenProduct:
    """Beside one of megatron-core's linear layers among the base classes: multiplies with a matrix that it makes."""

    make_matrix: MakeMatrix

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Tensor:
        """Return [s, b, o] (called by megatron-core). `weight`: only there because it asks for one."""
        if kwargs["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=kwargs["tp_group"]
            )
        group = kwargs["tp_group"] if kwargs["allreduce_dgrad"] else None
        product: Tensor = _Product.apply(input, self.make_matrix, group)
        return product if bias is None else product + bias


class BiasAfterProduct:
    """Beside one of megatron-core's linear layers among the base classes: adds the bias where autograd sees it."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Tensor:
        """Return [s, b, o] (called by megatron-core)."""
        product: Tensor = super()._forward_impl(input, weight, bias=None, **kwargs)  # type: ignore[misc]
        return product if bias is None else product + bias


def train_biases(model: nn.Module) -> None:
    """Let the layers whose matrix is frozen compute the gradients of their trained biases.

    Call when it is known what is trained, and before matrices are quantized.
    """
    for layer in model.modules():
        parameters = dict(layer.named_parameters(recurse=False))
        matrix, bias = parameters.get("weight"), parameters.get("bias")
        if matrix is None or matrix.requires_grad or bias is None or not bias.requires_grad:
            continue
        if isinstance(layer, ColumnParallelLinear):
            if not isinstance(layer, BiasAfterProduct):
                kind = type(layer)
                required(kind, "_forward_impl")
                layer.__class__ = type(f"{kind.__name__}WithTrainedBias", (BiasAfterProduct, kind), {})
        elif _is_linear_of_transformer_engine(layer):
            # The bias's gradient is a by-product of the matrix's there, unless it is added as in row-parallel layers.
            replace_name(layer, "gemm_bias_unfused_add", required(layer, "apply_bias"))


def _is_linear_of_transformer_engine(layer: nn.Module) -> bool:
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(layer).__mro__}
    modules = "transformer_engine.pytorch.module."
    return not names.isdisjoint((f"{modules}linear.Linear", f"{modules}layernorm_linear.LayerNormLinear"))


def freeze_with(layer: nn.Module, make_matrix: MakeMatrix) -> None:
    """Replace a layer's matrix by one that is made when it is needed.

    Raises:
        AttributeError: not one of megatron-core's own linear layers, or it multiplies elsewhere now.
    """
    kind = type(layer)
    if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        raise AttributeError(f"expected one of megatron-core's linear layers, found a {kind.__qualname__}")
    required(kind, "_forward_impl")
    del layer.weight
    vars(layer)["weight"] = torch.empty(0)
    vars(layer)["make_matrix"] = make_matrix
    layer.__class__ = type(f"Frozen{kind.__name__}", (FrozenProduct, kind), {})


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
