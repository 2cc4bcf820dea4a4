"""Attention by FlashAttention 4, and the embedding's gradient, beside torch's."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from llava_mcore.compat import flash_attention_4
from llava_mcore.models.attention.flash import FlashAttention
from llava_mcore.models.language.embedding import Lookup

pytestmark = pytest.mark.gpu
needs_package = pytest.mark.skipif(not flash_attention_4.is_usable(), reason="flash-attn-4 cannot be used")
HEADS = 4
DECODERS = ((32, 32, 128), (28, 4, 128), (32, 8, 64), (8, 4, 96), (8, 1, 32))
"""Heads, query groups, head size: LLaVA-1.5's, Qwen2.5's, Llama 3.2's and others."""


def exact(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Return attention [s, n, d] of one sequence to keys and values [s, g, d]."""
    parts = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True).transpose(0, 1)


def check(layer: FlashAttention, shapes: Sequence[Sequence[int]], lengths: Sequence[int], room: int) -> None:
    """Compare both passes in bf16 with fp64, which differ by about the rounding of the results.

    Args:
        lengths: of packed sequences; none: nothing is packed.
        room: for how many sequences there is room, as in CUDA graphs; the others are empty.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [torch.randn(*shape, device="cuda", generator=generator).bfloat16() for shape in shapes]
    params = None
    if lengths:
        bounds = torch.tensor([0, *lengths, *[0] * (room - len(lengths))], device="cuda").cumsum(0).int()
        params = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=sum(lengths), max_seqlen_kv=sum(lengths))

    def both_passes() -> list[Tensor]:
        taken = [x.clone().requires_grad_() for x in parts]
        out = layer(*taken, None, packed_seq_params=params)
        return [out, *torch.autograd.grad(out, taken, torch.ones_like(out).cumsum(-1) / out.shape[-1])]

    found = both_passes()
    wide = [x.double().requires_grad_() for x in parts]
    if lengths:
        limits = pairwise([0, *accumulate(lengths)])
        each = [exact(*(x[a:b] for x in wide), causal=layer.causal) for a, b in limits]
        expected = torch.cat(each).flatten(1)
    else:
        each = [exact(*(x[:, i] for x in wide), causal=layer.causal) for i in range(wide[0].shape[1])]
        expected = torch.stack(each, dim=1).flatten(2)
    weights = torch.ones_like(expected).cumsum(-1) / expected.shape[-1]
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, wide, weights)], strict=True):
        assert (one.double() - other).norm() <= 1e-2 * other.norm()
    if layer.deterministic:
        assert all(one.equal(other) for one, other in zip(found, both_passes(), strict=True))


def layer_of(
    size: int, *, heads: int = HEADS, groups: int = HEADS, causal: bool, deterministic: bool
) -> FlashAttention:
    """Return the layer whose heads have a size."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * size,
        kv_channels=size,
        num_attention_heads=heads,
        num_query_groups=groups,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    config.deterministic_mode = deterministic
    return FlashAttention(config, AttnMaskType.causal if causal else AttnMaskType.no_mask)


@needs_package
@pytest.mark.parametrize("size", [72, 80])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_images(size: int, deterministic: bool) -> None:
    """Within images of any size."""
    lengths = [700, 64, 3, 1281]
    layer = layer_of(size, causal=False, deterministic=deterministic)
    check(layer, [(sum(lengths), HEADS, size)] * 3, lengths, 8)


@needs_package
@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(32, 32, 128), (28, 4, 128), (32, 8, 64), (8, 4, 96), (8, 1, 32)]
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", [(680, 1, 415, 1500, 64), ()], ids=["packed", "not packed"])
def test_decoders(heads: int, groups: int, size: int, deterministic: bool, lengths: tuple[int, ...]) -> None:
    """Of every shape, packed samples of any length."""
    tokens = (sum(lengths),) if lengths else (777, 3)
    layer = layer_of(size, heads=heads, groups=groups, causal=True, deterministic=deterministic)
    check(layer, [(*tokens, heads, size), *[(*tokens, groups, size)] * 2], lengths, 8)


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
