"""FP8 products of experts: errors of each product beside a loop over them in fp32, and what is kept when."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from llava_mcore.models.language.grouped_fp8 import Fp8GroupedProduct, Fp8Matrices
from tests.helpers.emulated_fp8 import emulated_fp8
from tests.unit.models.test_grouped_product import COUNTS, loop, operands

TOLERANCES = {"output": 0.05, "of x": 0.05, "of weight": 0.004}
"""Relative errors of products whose operands have three bits after the first, and of one in bfloat16."""


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulated_fp8():
        yield


def product(x: Tensor, weight: Tensor, ends: Tensor, adds: bool = False) -> Tensor:
    output: Tensor = Fp8GroupedProduct.apply(x, weight, ends, Fp8Matrices.of(weight, backward=True), adds)
    return output


def error(found: Tensor, expected: Tensor) -> float:
    one, other = found.detach().double(), expected.detach().double()
    return float((one - other).norm() / other.norm().clamp(min=1e-60))


def products(x: Tensor, weight: Tensor, counts: list[int], gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and both gradients of a loop over experts, in fp32."""
    one, other = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    output = loop(one, other, counts)
    return output, *torch.autograd.grad(output, [one, other], gradient.float())


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b, (name, tolerance) in zip(found, expected, TOLERANCES.items(), strict=True):
        assert a.shape == b.shape and a.dtype == torch.bfloat16
        assert error(a, b) < tolerance, name


def check(counts: list[int], device: str) -> None:
    """Also on GPUs: see tests/gpu."""
    x, weight, ends, gradient = operands(counts, device)
    output = product(x, weight, ends)
    found = torch.autograd.grad(output, [x, weight], gradient)
    compare((output, *found), products(x, weight, counts, gradient))
    assert not found[1][[i for i, count in enumerate(counts) if not count]].any(), "zeros, not what was in memory"
    # Added to the fp32 sum of a step, as data parallelism prepares it.
    vars(weight)["main_grad"] = torch.ones(weight.shape, device=device)
    product(x, weight, ends, adds=True).backward(gradient)
    assert vars(weight)["grad_added_to_main_grad"] is True
    torch.testing.assert_close(vars(weight)["main_grad"], 1 + found[1].float())


@pytest.mark.parametrize("counts", [*COUNTS, [40, 16, 1, 300]], ids=str)
def test_values_and_gradients(counts: list[int]) -> None:
    check(counts, "cpu")


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_scales_follow_the_values(size: float) -> None:
    """Gradients of any size, as those of a step's sum of losses."""
    counts = [3, 0, 8, 1]
    x, weight, ends, gradient = operands(counts, "cpu")
    output = product(x, weight, ends)
    found = torch.autograd.grad(output, [x, weight], gradient * size)
    compare((output, *found), products(x, weight, counts, gradient * size))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["x", "gradient"])
def test_values_that_are_no_numbers_are_not_lost(value: float, place: str) -> None:
    """A step with such values is skipped, so they must reach the gradients."""
    x, weight, ends, gradient = operands([3, 0, 8, 1], "cpu")
    with torch.no_grad():
        (x if place == "x" else gradient)[1, 2] = value
    output = product(x, weight, ends)
    found = torch.autograd.grad(output, [x, weight], gradient)
    assert not found[1].isfinite().all()
    assert not (output if place == "x" else found[0]).isfinite().all()


def saved(run: Callable[[], Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    """Return the types and shapes of what a forward pass keeps."""
    kept: list[tuple[torch.dtype, torch.Size]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor.dtype, tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return kept


def test_only_what_gradients_need_is_kept() -> None:
    x, weight, ends, _ = operands([3, 0, 8, 1], "cpu")
    of_ends = (torch.int32, ends.shape)
    assert saved(lambda: product(x, weight, ends)) == [of_ends, (torch.bfloat16, x.shape)]
    frozen = weight.detach()
    assert saved(lambda: product(x, frozen, ends)) == [of_ends]
    assert Fp8Matrices.of(frozen, backward=False).columns is None
