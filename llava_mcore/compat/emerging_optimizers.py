"""Coefficients and scales of the package emerging-optimizers, which the optimizer Muon needs.

megatron-core's own Muon takes them from there too; docs/extend/optimizer.md says why it is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llava_mcore.compat.required import required

_REPEATS_LAST = ("polar_express", "cans", "deepseekv4")
"""Names whose last step is repeated if there are more; the others begin again."""


def coefficients_of(name: str, steps: int) -> list[tuple[float, float, float]]:
    """Return the coefficients of each step of the Newton-Schulz iteration.

    The package's own iteration is not used: it multiplies symmetric matrices in full, and in fp32 what is in bf16. Its
    Triton kernel for symmetric products measures hundreds of variants of itself in the first step, and a resumed run
    that chooses another one would not continue with the same bits.
    """
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    sets = required(muon_utils, "_COEFFICIENT_SETS")[name]
    mode = "repeat_last" if name in _REPEATS_LAST else "cycle"
    return list(required(muon_utils, "get_coefficient_iterator")(steps, sets, mode=mode))


def scale_of(rows: int, columns: int, mode: str) -> float:
    """Return the factor of an update of a matrix (`spectral`: the root of the larger side)."""
    from emerging_optimizers.orthogonalized_optimizers import muon

    return float(required(muon, "get_muon_scale_factor")(rows, columns, mode=mode))


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Multiply fp32 matrices in this precision: highest (fp32), high (TF32) or medium (the iteration runs in bf16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
