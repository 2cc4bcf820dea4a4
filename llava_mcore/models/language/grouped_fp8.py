"""Products of each expert's tokens and its matrix in FP8, on Hopper.

torch's grouped product (2.11) multiplies e4m3 by e4m3, with one scale for each row of either operand along what is
summed over: for each token and row of a matrix in the forward pass, for each token and column in the input's gradient,
for each expert's columns in the matrix's gradient. The scales are computed from the values themselves, so none are
kept from step to step, whatever recipe the model's other layers use.

    output     = x [t, k]         · matrices [e, n, k]ᵀ   fast accumulation, as Transformer Engine's layers
    of input   = gradient [t, n]  · matrices [e, n, k]
    of matrix  = gradientᵀ [n, t] · x [t, k]              summed over each expert's tokens

e: experts, t: tokens, sorted by expert, n, k: rows and columns of an expert's matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.models.language.grouped_products import added_to_main_grad

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

    If the matrix is trained, the tokens are kept for the backward pass, in the FP8 form that the matrix's gradient
    reads.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, matrices: Fp8Matrices, keeps: bool, adds_to_main_grad: bool
    ) -> Tensor:
        """
        Args:
            weight: what gets the gradient.
            ends: int32 [e], where the tokens of each expert end.
            matrices: of the weight.
            keeps: there will be a backward pass.
            adds_to_main_grad: add the weight's gradient to the sum of the step.
        """
        from llava_mcore.models.kernels import quantize_fp8  # on GPUs only

        ctx.weight, ctx.matrices, ctx.adds_to_main_grad = weight, matrices, adds_to_main_grad
        ctx.shape = x.shape
        of_tokens: tuple[Tensor, ...] = ()
        if keeps and ctx.needs_input_grad[1] and len(x):
            columns, padded_ends = quantize_fp8.quantize_groups(x, ends)
            of_tokens = *columns, padded_ends
        ctx.save_for_backward(ends, *of_tokens)
        if not len(x):  # the kernel refuses empty operands
            return x.new_empty(0, matrices.rows.scales.shape[1])
        return scaled_product(quantize_fp8.quantize_rows(x), matrices.rows, ends, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from llava_mcore.models.kernels import quantize_fp8  # on GPUs only

        gradient, weight = gradients[0], ctx.weight
        ends, *of_tokens = ctx.saved_tensors
        of_x, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_x = gradient.new_empty(ctx.shape)
            if len(gradient):
                of_x = scaled_product(quantize_fp8.quantize_rows(gradient), ctx.matrices.columns, ends, fast=False)
        if ctx.needs_input_grad[1]:
            if of_tokens:
                tokens = quantize_fp8.Scaled(*of_tokens[:2])
                columns, padded_ends = quantize_fp8.quantize_groups(gradient, ends)
                of_weight = scaled_product(columns, tokens, padded_ends, fast=False)
            else:
                of_weight = torch.zeros_like(weight)
            of_weight = added_to_main_grad(weight, of_weight) if ctx.adds_to_main_grad else of_weight
        return of_x, of_weight, None, None, None, None


def scaled_product(a: Scaled, b: Scaled, ends: Tensor, *, fast: bool) -> Tensor:
    """Return a · bᵀ in bfloat16: [t, n] of a [t, k] and b [e, n, k], or [e, m, n] of a [m, t] and b [n, t].

    Args:
        ends: int32 [e], where the t of each expert end.
        fast: accumulate with fewer bits.
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
        use_fast_accum=fast,
    )
    return product
