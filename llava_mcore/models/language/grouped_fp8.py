"""Products of each expert's tokens and its matrix in FP8, on Hopper.

torch's grouped product (2.11) multiplies e4m3 by e4m3, with one scale for each row of either operand along what is
summed over: for each token and row of a matrix in the forward pass, for each token and column in the input's gradient.
The scales are computed from the values themselves, so none are kept from step to step, whatever recipe the model's
other layers use.

    output     = x [t, k]         · matrices [e, n, k]ᵀ   in FP8
    of input   = gradient [t, n]  · matrices [e, n, k]    in FP8
    of matrix  = gradientᵀ [n, t] · x [t, k]              in bfloat16, summed over each expert's tokens

On an H200, the matrix's gradient took longer in FP8 than in bfloat16. So did the input's gradient without fast
accumulation, which rounds sums to about 14 bits. That is 100 times less than what e4m3 rounds.

e: experts, t: tokens, sorted by expert, n, k: rows and columns of an expert's matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.models.language.grouped_products import weight_gradient

if TYPE_CHECKING:
    from llava_mcore.models.kernels.quantize_fp8 import Scaled

GROUPED_FP8_MAJOR = 9
"""Compute capability of the GPUs that torch has this product for."""


class Fp8Matrices(NamedTuple):
    """Matrices of experts as the products read them: [e, n, k], and for the backward pass [e, k, n]."""

    rows: Scaled
    columns: Scaled | None

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, *, backward: bool, earlier: Fp8Matrices | None = None) -> Fp8Matrices:
        """Quantize matrices [e, n, k].

        Args:
            backward: also for gradients.
            earlier: of earlier weights, in whose memory the result is: CUDA graphs read it there.
        """
        from llava_mcore.models.kernels import quantize_fp8  # on GPUs only

        rows, columns = (None, None) if earlier is None else earlier
        if backward or columns is not None:
            columns = quantize_fp8.quantize_transposed(weight, columns)
        return cls(quantize_fp8.quantize_rows(weight, rows), columns)


class Fp8GroupedProduct(torch.autograd.Function):
    """The product of each expert's tokens and its matrix: [t, k], [e, n, k] → [t, n] in bfloat16.

    If the matrix is trained, the tokens are kept for the backward pass in bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, matrices: Fp8Matrices, adds_to_main_grad: bool
    ) -> Tensor:
        """
        Args:
            weight: what gets the gradient.
            ends: int32 [e], where the tokens of each expert end.
            matrices: of the weight.
            adds_to_main_grad: add the weight's gradient to the sum of the step.
        """
        from llava_mcore.models.kernels import quantize_fp8  # on GPUs only

        ctx.weight, ctx.matrices, ctx.adds_to_main_grad = weight, matrices, adds_to_main_grad
        ctx.shape = x.shape
        ctx.save_for_backward(ends, x if ctx.needs_input_grad[1] else None)
        if not len(x):  # the kernel refuses empty operands
            return x.new_empty(0, matrices.rows.scales.shape[1])
        return scaled_product(quantize_fp8.quantize_rows(x), matrices.rows, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from llava_mcore.models.kernels import quantize_fp8  # on GPUs only

        gradient = gradients[0].contiguous()
        ends, x = ctx.saved_tensors
        of_x, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_x = gradient.new_empty(ctx.shape)
            if len(gradient):
                of_x = scaled_product(quantize_fp8.quantize_rows(gradient), ctx.matrices.columns, ends)
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(gradient, x, ctx.weight, ends, adds_to_main_grad=ctx.adds_to_main_grad)
        return of_x, of_weight, None, None, None


def scaled_product(a: Scaled, b: Scaled, ends: Tensor) -> Tensor:
    """Return a · bᵀ in bfloat16: [t, n] of a [t, k] and b [e, n, k].

    Args:
        ends: int32 [e], where the t of each expert end.
    """
    product: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # torch's stubs do not have it yet
        a.values,
        b.values.transpose(-2, -1),
        a.scales,
        F.ScalingType.RowWise,
        b.scales,
        F.ScalingType.RowWise,
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product
