"""flash-linear-attention's kernels compute what torch does, packed samples apart, forward and backward."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from llava_mcore.compat.delta_rule import has_fla
from llava_mcore.models.language.delta_net import DeltaRule, GatedNorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_fla(), reason="needs a GPU and fla-core"),
]
KEY_HEADS, HEADS, SIZE, WIDTH = 4, 8, 64, 4
BOUNDS = (0, 70, 71, 200, 333, 448)
"""Samples shorter than a convolution, and longer than a chunk of the kernels."""


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Return mixed, weight, decay and beta of `DeltaRule`, and a gate."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    channels, s = 2 * KEY_HEADS * SIZE + HEADS * SIZE, BOUNDS[-1]
    shapes = [(1, s, channels), (channels, WIDTH), (1, s, HEADS), (1, s, HEADS), (1, s, HEADS, SIZE)]
    mixed, weight, decay, beta, gate = (torch.randn(x, generator=generator, device="cuda") for x in shapes)
    tensors = [mixed.to(dtype), 0.5 * weight.to(dtype), -decay.abs(), beta.sigmoid().to(dtype), gate.to(dtype)]
    return [x.requires_grad_() for x in tensors]


def outputs(tensors: list[Tensor], *, deterministic: bool) -> list[Tensor]:
    """Return the gated output of a pack, then the gradients of a weighted sum of it."""
    mixed, weight, decay, beta, gate = tensors
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        params_dtype=mixed.dtype,
        deterministic_mode=deterministic,
    )
    norm = GatedNorm(config, SIZE, 1e-2).cuda()
    rule = DeltaRule(KEY_HEADS, SIZE, SIZE, deterministic=deterministic)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    out = norm(rule(mixed, weight, decay, beta, bounds), gate)
    factors = torch.randn(out.shape, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda")
    return [out.detach(), *torch.autograd.grad((out.float() * factors).sum(), [*tensors, norm.weight])]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-2), (torch.bfloat16, 4e-2)])
def test_kernels_and_torch_agree(dtype: torch.dtype, allowed: float) -> None:
    """Kernels multiply in TF32 at best, so fp32 is compared like half precision, by the norm of the difference."""
    found, expected = (outputs(inputs(dtype), deterministic=x) for x in (False, True))
    for x, y in zip(found, expected, strict=True):
        assert (x.float() - y.float()).norm() <= allowed * y.float().norm()


def test_a_prompt_leaves_the_same_state() -> None:
    mixed, weight, decay, beta, _ = (x.detach() for x in inputs(torch.float32))
    rules = [DeltaRule(KEY_HEADS, SIZE, SIZE, deterministic=x) for x in (False, True)]
    (out, state), (expected, last) = (x.of_sequence(mixed, weight, decay, beta, with_state=True) for x in rules)
    assert state is not None and last is not None
    for x, y in ((out, expected), (state, last)):
        assert (x.float() - y.float()).norm() <= 1e-2 * y.float().norm()
