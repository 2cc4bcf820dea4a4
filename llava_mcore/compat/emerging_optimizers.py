"""The Newton-Schulz iteration of the package emerging-optimizers, which the optimizer Muon needs.

megatron-core's own Muon calls the same functions; docs/extend/optimizer.md says why it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from llava_mcore.compat.required import required


def newton_schulz(*, steps: int, coefficients: str, scale: str, scale_factor: float) -> Callable[[Tensor], Tensor]:
    """Return the function that orthogonalizes an fp32 matrix, or each of a stack of them, and scales the result.

    Args:
        scale: how the result is scaled by the matrix's shape (`spectral`: by the root of the larger side).
        scale_factor: the result is multiplied by this, too.

    The package's Triton kernel for symmetric products is not used. It measures hundreds of variants of itself in the
    first step, and a resumed run that chooses another one would not continue with the same bits.
    """
    from emerging_optimizers.orthogonalized_optimizers import muon, muon_utils

    iterate = required(muon_utils, "newton_schulz")
    factor_of = required(muon, "get_muon_scale_factor")

    def orthogonalize(matrix: Tensor) -> Tensor:
        result: Tensor = iterate(matrix.contiguous(), steps=steps, coefficient_type=coefficients)
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
