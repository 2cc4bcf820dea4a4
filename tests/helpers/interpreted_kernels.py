"""Runs our kernels on the CPU, by Triton's interpreter, and compares them with torch's operations.

    TRITON_INTERPRET=1 python -m tests.helpers.interpreted_kernels

The interpreter is chosen when a kernel's file is imported, hence a process of its own. It multiplies bfloat16 wrongly,
and rounds to FP8 wrongly.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from itertools import pairwise
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from llava_mcore.models.kernels import add_gradients, logit_gradients, quantize_fp8
from llava_mcore.models.kernels.chunk_operations import log_sum_and_target, torch_gradients
from llava_mcore.models.kernels.window_attention import WindowAttention
from llava_mcore.models.rotary import Rotation, rotate, split_rotated
from tests.helpers import emulated_fp8

HEADS = ((3, 1, 10, 10), (2, 7, 16, 16), (2, 2, 16, 8), (20, 1, 80, 80))
"""Groups, query heads of a group, head size, rotated dims: blocks that are full and such that are not."""
WINDOWS = (([64, 3, 0, 17, 1, 0], 2, 80), ([8, 16], 3, 16))
"""Lengths of windows, heads, head size."""
LOGITS = ((8192, 8192), (5000, 4097), (128, 101), (128, 0))
"""Rows of the vocabulary, and how many of them are not padding: blocks that are full and such that are not."""

MATRICES = ((2, 48, 80), (1, 300, 64), (3, 1, 130))
"""Matrices, their rows and columns, of which tiles have 128 and 64: tiles that are full and such that are not."""
SUMS = ((5, 3000), (4096,), (0, 7), (3,))
"""Gradients that are added to sums: blocks that are full and such that are not."""


def compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    """Compare outputs and gradients."""
    weights = [torch.randn_like(x) for x in expected]
    here, there = (torch.autograd.grad(x, inputs, weights) for x in (found, expected))
    for one, other in zip((*found, *here), (*expected, *there), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def rotary(groups: int, queries: int, size: int, rotated: int) -> None:
    mixed = torch.randn(5, 2, groups, (queries + 2) * size).requires_grad_()
    half = torch.randn(5, 2, 1, rotated // 2) * 100
    angles = torch.cat((half, half), dim=-1)
    for padding in (0, 6):
        query, key, value = mixed.split([queries * size, size, size], dim=-1)
        turned = [rotate(x.reshape(5, 2, -1, size), Rotation(angles)) for x in (query, key)]
        expected = tuple(F.pad(x, (0, padding)) for x in (*turned, value))
        compare(split_rotated(mixed, angles, size, size + padding), expected, [mixed])


def windows(lengths: list[int], heads: int, size: int) -> None:
    inputs = [torch.randn(sum(lengths), heads, size).requires_grad_() for _ in range(3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    spans = [slice(a, b) for a, b in pairwise(bounds.tolist()) if a < b]
    each = [scaled_dot_product_attention(*(x[span].transpose(0, 1) for x in inputs)).transpose(0, 1) for span in spans]
    compare((WindowAttention.apply(*inputs, bounds),), (torch.cat(each),), inputs)


def losses(rows: int, num_true: int) -> None:
    """Labels are on other ranks too, and the log-sum-exp is larger than that of these rows."""
    logits = torch.randn(6, rows) * 20
    local = torch.tensor([0, max(num_true, 1) - 1, num_true // 2, -5, rows, rows + 7])
    found = logit_gradients.log_sum_and_target(logits, local, num_true)
    for one, other in zip(found, log_sum_and_target(logits, local, num_true), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)
    log_sum, at_target = torch.full((6,), 100.0), torch.linspace(-1.0, 0.0, 6)
    given = local, log_sum, at_target, num_true, torch.float16
    expected = torch_gradients(logits.clone(), *given)
    torch.testing.assert_close(logit_gradients.into_gradients(logits, *given), expected, rtol=2e-3, atol=1e-7)


def fp8(*shape: int) -> None:
    """Before values are rounded."""
    matrices = torch.randn(shape)
    matrices[..., ::7] *= 1e-4
    matrices[..., 5] = 0
    matrices[0, 0] = 0

    def unrounded(x: Tensor, values: tuple[int, ...], scales: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return x.new_zeros(values), x.new_zeros(scales)

    with mock.patch.object(quantize_fp8, "_empty", unrounded), mock.patch.object(emulated_fp8, "E4M3", torch.float32):
        pairs = [(quantize_fp8.quantize_transposed(matrices), emulated_fp8.quantize_transposed(matrices))]
        pairs += [(quantize_fp8.quantize_rows(y), emulated_fp8.quantize_rows(y)) for y in (matrices[0], matrices)]
    for one, other in pairs:
        torch.testing.assert_close(one.values, other.values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.scales, other.scales, rtol=1e-5, atol=0)


def sums(*shape: int) -> None:
    total, gradient = torch.randn(shape), torch.randn(shape).half()
    expected = total + gradient
    add_gradients.add_gradient(total, gradient)
    assert torch.equal(total, expected)


def main() -> None:
    torch.manual_seed(0)
    for shape in HEADS:
        rotary(*shape)
    for case in WINDOWS:
        windows(*case)
    for sizes in LOGITS:
        losses(*sizes)
    for shape in MATRICES:
        fp8(*shape)
    for shape in SUMS:
        sums(*shape)
    print(f"{len(HEADS) + len(WINDOWS) + len(LOGITS) + len(MATRICES) + len(SUMS)} shapes agree")


if __name__ == "__main__":
    main()
