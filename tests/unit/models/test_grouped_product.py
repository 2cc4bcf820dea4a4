"""The grouped product of experts: values and gradients of a loop over them, also for experts without tokens."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llava_mcore.models.language.grouped_products import GroupedProduct

COUNTS = ([3, 0, 8, 1], [0, 0, 5, 0], [0, 0, 0, 0], [0, 7, 0, 0])


def operands(counts: list[int], device: str) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """Return tokens [t, k], matrices [e, n, k], the ends of the experts' tokens, and a gradient [t, n]."""
    generator = torch.Generator().manual_seed(0)
    x, matrices, gradient = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((sum(counts), 32), (len(counts), 48, 32), (sum(counts), 48))
    )
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    return x.requires_grad_(), nn.Parameter(matrices), ends, gradient


def loop(x: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(x.split(counts), matrices, strict=True)])


def check(counts: list[int], device: str) -> None:
    x, weight, ends, gradient = operands(counts, device)
    expected = loop(x, weight, counts)
    expected_gradients = torch.autograd.grad(expected, [x, weight], gradient)
    output = GroupedProduct.apply(x, weight, ends, False)
    found = torch.autograd.grad(output, [x, weight], gradient, retain_graph=True)
    for a, b in zip((output, *found), (expected, *expected_gradients), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert not found[1][[i for i, count in enumerate(counts) if not count]].any(), "zeros, not what was in memory"
    # Added to the fp32 sum of a step, as data parallelism prepares it.
    vars(weight)["main_grad"] = torch.ones(weight.shape, device=device)
    GroupedProduct.apply(x, weight, ends, True).backward(gradient)
    assert vars(weight)["grad_added_to_main_grad"] is True
    torch.testing.assert_close(vars(weight)["main_grad"], 1 + found[1].float())


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_product(counts: list[int]) -> None:
    check(counts, "cpu")
