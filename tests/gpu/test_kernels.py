"""Our kernels compute what torch's operations do."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention as attention

from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.models.kernels.chunk_operations import log_sum_and_target, torch_gradients
from llava_mcore.models.rotary import Rotation, rotate, rotate_fused, split_rotated

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    from llava_mcore.models.kernels import add_gradients, logit_gradients
    from llava_mcore.models.kernels.window_attention import WindowAttention
SHAPES = {
    "LLaVA-1.5-7B": (32, 1, 128, 128),
    "Qwen2.5-VL-7B": (4, 7, 128, 128),
    "Qwen2.5-VL's tower": (16, 1, 80, 80),
    "parts of heads": (3, 2, 96, 72),
}


@pytest.mark.parametrize(("groups", "queries", "size", "rotated"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("padding", [0, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_and_gradients(
    groups: int, queries: int, size: int, rotated: int, padding: int, dtype: torch.dtype
) -> None:
    """The kernel's heads and their gradients are those of torch."""
    generator = torch.Generator("cuda").manual_seed(0)
    given = {"device": "cuda", "generator": generator}
    mixed = torch.randn(130, 2, groups, (queries + 2) * size, **given).to(dtype).requires_grad_()
    angles = torch.randn(130, 2, 1, rotated // 2, **given) * 1000
    angles = torch.cat((angles, angles), dim=-1)
    padded = split_rotated(mixed, angles, size, size + padding)
    assert not any(x[..., size:].any() for x in padded)
    found = [x[..., :size] for x in padded]
    parts = [x.reshape(130, 2, -1, size) for x in mixed.split([queries * size, size, size], dim=-1)]
    expected = [*(rotate(x, Rotation(angles), in_float32=True) for x in parts[:2]), parts[2]]
    weights = [torch.randn(x.shape, **given).to(dtype) for x in expected]
    allowed = {"rtol": 2**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **allowed)
    here, there = (torch.autograd.grad(x, mixed, weights, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(here, there, **allowed)
    torch.testing.assert_close(found[0], rotate_fused(parts[0], angles), **allowed)


@pytest.mark.parametrize("lengths", [[64, 3, 0, 17, 1, 64, 0], [8] * 300], ids=["all", "equal"])
@pytest.mark.parametrize("size", [80, 64, 16])
def test_windows(lengths: list[int], size: int) -> None:
    """Attention in windows has the values and gradients of exact attention in each."""
    generator = torch.Generator("cuda").manual_seed(0)
    given = {"device": "cuda", "generator": generator}
    heads, number = 3, sum(lengths)
    parts = [torch.randn(number, heads, size, **given).bfloat16().requires_grad_() for _ in range(3)]
    weights = torch.randn(number, heads, size, **given).bfloat16()
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    found = WindowAttention.apply(*parts, bounds)
    here = [found, *torch.autograd.grad(found, parts, weights)]
    exact = [x.detach().double().requires_grad_() for x in parts]
    windows = [x for x in zip(bounds.tolist(), bounds.tolist()[1:], strict=False) if x[0] < x[1]]
    expected = torch.cat([attention(*(x[a:b].transpose(0, 1) for x in exact)).transpose(0, 1) for a, b in windows])
    there = [expected, *torch.autograd.grad(expected, exact, weights.double())]
    for one, other in zip(here, there, strict=True):
        assert (one.double() - other).norm() <= 5e-3 * other.norm()  # about bf16's rounding of the results alone
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


@pytest.mark.parametrize(("rows", "num_true"), [(32128, 32000), (152064, 151936), (5000, 4097), (128, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_gradients_in_place_of_logits(rows: int, num_true: int, dtype: torch.dtype) -> None:
    """Losses and the gradients written over the logits are those of torch."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 20 * torch.randn(1000, rows, device="cuda", generator=generator)
    local = torch.randint(-rows, 2 * rows, (1000,), device="cuda", generator=generator)  # most are on other ranks
    exact = logits.double()
    found = logit_gradients.log_sum_and_target(logits, local, num_true)
    for one, other in zip(found, log_sum_and_target(exact, local, num_true), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-5)
    log_sum = found[0].clamp(min=100.0)
    at_target = torch.rand(1000, device="cuda", generator=generator) - 1
    expected = torch_gradients(exact, local, log_sum.double(), at_target.double(), num_true, torch.float64)
    for _ in range(3):  # threads may overtake each other in any order
        gradients = logit_gradients.into_gradients(logits.clone(), local, log_sum, at_target, num_true, dtype)
        torch.testing.assert_close(gradients.double(), expected, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_decoder_attention_without_whole_scores(window: int | None, packed: bool) -> None:
    """Gemma 3's layers: results and gradients of the plain operations, and the host does not wait."""
    config = TransformerConfig(num_layers=1, hidden_size=1024, num_attention_heads=4, attention_dropout=0.0)
    config.window_size = None if window is None else (window - 1, 0)
    layer = SDPAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.05)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (600,) if packed else (300, 2)
    heads = (4, 2, 2)
    parts = [torch.randn(*shape, n, 256, device="cuda", generator=generator).bfloat16().requires_grad_() for n in heads]
    weights = torch.randn(*shape, 1024, device="cuda", generator=generator).bfloat16()
    bounds = torch.tensor([0, 150, 151, 400, 600], dtype=torch.int32, device="cuda")
    params = PackedSeqParams("thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=249, max_seqlen_kv=249)
    given = {"packed_seq_params": params if packed else None}
    exact = [x.detach().double().requires_grad_() for x in parts]  # fp64 takes the plain operations
    expected = layer(*exact, **given)
    there = [expected, *torch.autograd.grad(expected, exact, weights.double())]
    for mode in ("default", "error"):  # the first time kernels are compiled
        torch.cuda.set_sync_debug_mode(mode)
        try:
            found = layer(*parts, **given)
            here = [found, *torch.autograd.grad(found, parts, weights)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(here, there, strict=True):
        assert (one.double() - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("window", [None, 100])
def test_queries_that_are_the_last_tokens(window: int | None) -> None:
    """A chunk of a sequence that ranks divide sees the chunks before it."""
    config = TransformerConfig(num_layers=1, hidden_size=512, num_attention_heads=4, attention_dropout=0.0)
    config.window_size = None if window is None else (window - 1, 0)
    layer = SDPAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((150, 2, 4, 128), (600, 2, 2, 128), (600, 2, 2, 128))
    parts = [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for shape in shapes]
    weights = torch.randn(150, 2, 512, device="cuda", generator=generator).bfloat16()
    exact = [x.detach().double().requires_grad_() for x in parts]
    expected, found = layer._attend(*exact), layer._attend(*parts)
    here = [found, *torch.autograd.grad(found, parts, weights)]
    there = [expected, *torch.autograd.grad(expected, exact, weights.double())]
    for one, other in zip(here, there, strict=True):
        assert (one.double() - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("shape", [(128, 1536, 2048), (3, 1001), (0, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bit for bit."""
    total, gradient = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda").to(dtype)
    expected = total + gradient
    add_gradients.add_gradient(total, gradient)
    assert torch.equal(total, expected)
