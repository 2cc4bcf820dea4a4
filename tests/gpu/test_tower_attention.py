"""Attention of towers by FlashAttention 4, and the embedding's gradient, beside torch's."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.compat import flash_attention_4
from llava_mcore.models.language.embedding import Lookup

pytestmark = pytest.mark.gpu
needs_package = pytest.mark.skipif(not flash_attention_4.is_usable(), reason="flash-attn-4 cannot be used")
HEADS = 4


def inputs(*shape: int) -> list[Tensor]:
    """Return queries, keys, values and a gradient in bf16."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(*shape, device="cuda", generator=generator).bfloat16() for _ in range(4)]


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention [s, n, d] of one sequence."""
    parts = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(*parts).transpose(0, 1)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare bf16 with fp64, which differ by about the rounding of the results."""
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 1e-2 * other.norm()


@needs_package
@pytest.mark.parametrize("size", [72, 80])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_images(size: int, deterministic: bool) -> None:
    """Within images of any size, among them empty ones at the end, which CUDA graphs have."""
    lengths, room = [700, 64, 3, 1281], 8
    *parts, gradient = inputs(sum(lengths), HEADS, size)
    bounds = torch.tensor([0, *lengths, *[0] * (room - len(lengths))], device="cuda").cumsum(0).int()

    def both_passes() -> list[Tensor]:
        taken = [x.clone().requires_grad_() for x in parts]
        query, key, value = taken
        out = flash_attention_4.attend_packed(
            query, key, value, bounds, sum(lengths), scale=size**-0.5, deterministic=deterministic
        )
        return [out, *torch.autograd.grad(out, taken, gradient)]

    found = both_passes()
    wide = [x.double().requires_grad_() for x in parts]
    limits = list(pairwise(bounds[: len(lengths) + 1].tolist()))
    expected = torch.cat([exact(*(x[a:b] for x in wide)) for a, b in limits])
    assert_close(found, [expected, *torch.autograd.grad(expected, wide, gradient.double())])
    if deterministic:
        assert all(one.equal(other) for one, other in zip(found, both_passes(), strict=True))


@pytest.mark.parametrize("num_tokens", [100, 8192])
def test_embedding_has_the_bits_of_autograd(num_tokens: int) -> None:
    """torch has one kernel for few tokens and one for many."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(5000, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    vars(weight)["main_grad"] = torch.zeros(5000, 64, device="cuda")
    ids = torch.randint(2000, (2, num_tokens // 2), device="cuda", generator=generator)
    ids[0, ::3] = 7
    gradient = torch.randn(*ids.shape, 64, device="cuda", generator=generator).bfloat16()
    Lookup.apply(weight, ids).backward(gradient)
    F.embedding(ids, plain).backward(gradient)
    assert plain.grad is not None and vars(weight)["main_grad"].equal(plain.grad.float())
