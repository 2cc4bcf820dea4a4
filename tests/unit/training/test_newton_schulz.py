"""The Newton-Schulz iteration in blocks is that of the package emerging-optimizers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from torch.utils.flop_counter import FlopCounterMode

from llava_mcore.compat.emerging_optimizers import coefficients_of, matmul_precision
from llava_mcore.training.optimization import newton_schulz as ours

SHAPES = ((40, 40), (23, 61), (61, 23), (3, 17, 29), (2, 29, 17))
STEPS = 11
"""More than any set of coefficients has."""
NAMES = ("quintic", "simple", "polar_express", "cans", "aol", "deepseekv4")


def matrix(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3


@pytest.mark.parametrize("smallest", [3, 2048])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_of_any_shape(shape: tuple[int, ...], smallest: int) -> None:
    """Blocks of odd sizes in three levels, and none; the scale is in the last step."""
    x = matrix(shape)
    with mock.patch.object(ours, "_SMALLEST", smallest), matmul_precision("highest"):
        found = ours.orthogonalized(x, coefficients_of("quintic", 5), scale=0.5, dtype=torch.float32)
        expected = 0.5 * newton_schulz(x, 5, "quintic")
    assert torch.equal(x, matrix(shape)), "its input is a momentum"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
    with mock.patch.object(ours, "_SMALLEST", smallest):
        in_bf16 = ours.orthogonalized(x, coefficients_of("quintic", 5), scale=0.5, dtype=torch.bfloat16)
    assert in_bf16.dtype == torch.bfloat16
    assert (in_bf16.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
def test_coefficients(name: str) -> None:
    x = matrix((12, 30))
    with matmul_precision("highest"):
        found = ours.orthogonalized(x, coefficients_of(name, STEPS), scale=1.0, dtype=torch.float32)
        expected = newton_schulz(x, STEPS, name)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_fewer_products_are_computed() -> None:
    """A square matrix of two by two blocks."""
    x = matrix((64, 64))
    full, blocks = (flops(x, smallest) for smallest in (64, 32))
    assert full == 5 * 6 * 64**3
    assert blocks == full * 5 / 6


def flops(x: torch.Tensor, smallest: int) -> int:
    with mock.patch.object(ours, "_SMALLEST", smallest), FlopCounterMode(display=False) as counter:
        ours.orthogonalized(x, coefficients_of("quintic", 5), scale=1.0, dtype=torch.float32)
    return counter.get_total_flops()
