"""Attention to divided tokens, in a group of one rank: the host knows the bounds of packed samples."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from llava_mcore.models.attention import SDPAttention
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


def _refuse(*_: Any) -> None:
    raise AssertionError("the host waits for the device")
