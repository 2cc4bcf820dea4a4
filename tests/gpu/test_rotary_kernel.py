"""The kernel that splits and rotates is what torch's operations are."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch

from llava_mcore.models.rotary import rotate, rotate_fused, split_rotated

pytestmark = pytest.mark.gpu
SHAPES = {
    "LLaVA-1.5-7B": (32, 1, 128, 128),
    "Qwen2.5-VL-7B": (4, 7, 128, 128),
    "Qwen2.5-VL's tower": (16, 1, 80, 80),
    "parts of heads": (3, 2, 96, 72),
}


@pytest.mark.parametrize(("groups", "queries", "size", "rotated"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_and_gradients(groups: int, queries: int, size: int, rotated: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    given = {"device": "cuda", "generator": generator}
    mixed = torch.randn(130, 2, groups, (queries + 2) * size, **given).to(dtype).requires_grad_()
    angles = torch.randn(130, 2, 1, rotated // 2, **given) * 1000
    angles = torch.cat((angles, angles), dim=-1)
    found = split_rotated(mixed, angles, size)
    parts = [x.reshape(130, 2, -1, size) for x in mixed.split([queries * size, size, size], dim=-1)]
    expected = [*(rotate(x, angles, in_float32=True) for x in parts[:2]), parts[2]]
    weights = [torch.randn(x.shape, **given).to(dtype) for x in expected]
    allowed = {"rtol": 2**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **allowed)
    here, there = (torch.autograd.grad(x, mixed, weights, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(here, there, **allowed)
    torch.testing.assert_close(found[0], rotate_fused(parts[0], angles), **allowed)
