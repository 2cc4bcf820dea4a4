"""Attention to divided tokens, in a group of one rank: the host knows the bounds of packed samples."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import single_process

BOUNDS = [0, 4, 12, 16]
WAITS = ("tolist", "item", "cpu", "nonzero", "numpy", "__int__", "__bool__", "__index__")
"""Methods of tensors with which the host waits for the device."""


@pytest.mark.parametrize("packed", [False, True])
def test_no_layer_waits_for_the_device(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True)
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self").eval()  # without dropout
    tokens = torch.zeros(1, BOUNDS[-1])
    bounds = torch.tensor(BOUNDS if packed else [], dtype=torch.int32)
    batch = MicroBatch(tokens, tokens, tokens, tokens, {}, bounds, bounds=BOUNDS if packed else [])
    params = batch.packed_seq_params
    x = torch.randn(BOUNDS[-1], *(() if packed else (1,)), 2, 8, requires_grad=True)
    with single_process() as groups:
        whole = attention(x, x, x, packed_seq_params=params)
        attention.cp_group = groups.stage  # of one rank, which has both chunks of every sample
        for name in WAITS:
            monkeypatch.setattr(torch.Tensor, name, _refuse)
        found = attention(x, x, x, packed_seq_params=params)
        found.sum().backward()
        monkeypatch.undo()
    assert torch.allclose(found, whole, atol=1e-6)


def test_bounds_that_the_host_does_not_know_are_read_once() -> None:
    tokens, bounds = torch.zeros(1, BOUNDS[-1]), torch.tensor(BOUNDS, dtype=torch.int32)
    params = MicroBatch(tokens, tokens, tokens, tokens, {}, bounds).packed_seq_params
    assert params is not None and list(params.bounds) == BOUNDS


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (5, 4.0), (None, 4.0)])
@pytest.mark.parametrize("num_queries", [12, 40])
def test_long_sequences_without_a_large_mask(
    num_queries: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same results and gradients as with one; with a window, or without a cap, no mask has all keys."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
    )
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self", softcap=softcap)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, h, 8, generator=draw) for n, h in ((num_queries, 4), (40, 2), (40, 2)))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    expected = attention._attend(q, k, v)
    expected_gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    monkeypatch.setattr("llava_mcore.models.attention.sdpa.LARGEST_MASK", 32)
    masks: list[int] = []
    made = attention._mask

    def counted(queries: int, keys: int, device: torch.device) -> Any:
        mask = made(queries, keys, device)
        masks.append(0 if mask is None else mask.numel())
        return mask

    monkeypatch.setattr(attention, "_mask", counted)
    result = attention._attend(q, k, v)
    gradients = torch.autograd.grad(result.square().sum(), (q, k, v))
    assert torch.allclose(result, expected, atol=1e-6)
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(gradients, expected_gradients, strict=True))
    assert max(masks) <= (0 if softcap is None else 12 * 40) if window is None else max(masks) <= 2 * window**2


def _refuse(*_: Any) -> None:
    raise AssertionError("the host waits for the device")
