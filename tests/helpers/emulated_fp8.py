"""FP8 products of experts on CPUs: torch's operations in place of Triton's kernels and the grouped product of GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor

from llava_mcore.models.kernels import quantize_fp8
from llava_mcore.models.kernels.quantize_fp8 import Scaled
from llava_mcore.models.language import grouped_fp8

E4M3 = torch.float8_e4m3fn


def quantize_rows(x: Tensor, out: Scaled | None = None) -> Scaled:
    largest = x.abs().amax(-1).float().clamp(min=2.0**-100)
    result = Scaled((x.float() * (448.0 / largest).unsqueeze(-1)).to(E4M3), largest / 448.0)
    return result if out is None else Scaled(*(a.copy_(b) for a, b in zip(out, result, strict=True)))


def quantize_transposed(matrices: Tensor, out: Scaled | None = None) -> Scaled:
    return quantize_rows(matrices.transpose(1, 2), out)


def scaled_product(a: Scaled, b: Scaled, ends: Tensor) -> Tensor:
    """The result of torch's grouped product, in float32; fails where that refuses operands."""
    spans = [slice(*span) for span in pairwise([0, *ends.tolist()])]
    one, two = a.values.float(), b.values.float()
    assert all(size % 16 == 0 for size in two.shape[1:])
    parts = [one[span] @ matrix.t() for span, matrix in zip(spans, two, strict=True)]
    columns = [scales.expand(span.stop - span.start, -1) for span, scales in zip(spans, b.scales, strict=True)]
    return (torch.cat(parts) * a.scales.unsqueeze(1) * torch.cat(columns)).to(torch.bfloat16)


@contextlib.contextmanager
def emulated_fp8() -> Iterator[None]:
    """Compute FP8 products of experts on the CPU."""
    with contextlib.ExitStack() as stack:
        for function in (quantize_rows, quantize_transposed):
            stack.enter_context(mock.patch.object(quantize_fp8, function.__name__, function))
        stack.enter_context(mock.patch.object(grouped_fp8, "scaled_product", scaled_product))
        yield
