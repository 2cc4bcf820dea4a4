"""The Newton-Schulz iteration of the package emerging-optimizers, which the optimizer Muon needs.

megatron-core's own Muon stands on the same functions; docs/extend/optimizer.md says why it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from llava_mcore.compat.required import required

_WITH_KERNEL = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Capabilities of GPUs for which the package says that its Triton kernel is right."""


def newton_schulz(*, steps: int, coefficients: str, scale: str, scale_factor: float) -> Callable[[Tensor], Tensor]:
    """Return the function that orthogonalizes an fp32 matrix, or each of a stack of them, and scales the result.

    Args:
        scale: how the result is scaled by the matrix's shape (`spectral`: by the root of the larger side).
        scale_factor: the result is multiplied by this, too.
    """
    from emerging_optimizers import triton_kernels
    from emerging_optimizers.orthogonalized_optimizers import muon, muon_utils

    iterate = required(muon_utils, "newton_schulz")
    factor_of = required(muon, "get_muon_scale_factor")
    has_kernel = required(triton_kernels, "HAS_TRITON_340") and torch.cuda.is_available()
    has_kernel = has_kernel and torch.cuda.get_device_capability() in _WITH_KERNEL

    def orthogonalize(matrix: Tensor) -> Tensor:
        # The kernel computes one half of a symmetric product. It is for single matrices in bf16.
        uses_kernel = has_kernel and matrix.ndim == 2 and torch.get_float32_matmul_precision() == "medium"
        result: Tensor = iterate(matrix.contiguous(), steps=steps, coefficient_type=coefficients, use_syrk=uses_kernel)
        return result * (factor_of(*matrix.shape[-2:], mode=scale) * scale_factor)

    return orthogonalize


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Multiply fp32 matrices in this precision: highest (fp32), high (TF32) or medium (the iteration runs in bf16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
