"""Gradient buffers are scaled as megatron-core scales them."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

from llava_mcore.compat.megatron import gradients
from llava_mcore.compat.megatron.gradients import scale_at_full_bandwidth

FACTORS = {"tensor": 1.0 / torch.tensor(4097), "number": 0.3}


def buffers() -> list[Any]:
    """Return one of dense layers and one of experts."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(23, generator=generator) for _ in range(4)]
    return [
        SimpleNamespace(grad_data=x, extra_main_grads=[y], scale_gradients=None)
        for x, y in zip(values[:2], values[2:], strict=True)
    ]


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_gradients_are_scaled_as_by_megatron_core(factor: Any) -> None:
    """Bit for bit, in parts of few elements."""
    assert "self.grad_data *= scaling_factor" in inspect.getsource(_ParamAndGradBuffer.scale_gradients)
    ours, theirs = buffers(), buffers()
    wrapped: Any = SimpleNamespace(buffers=ours[:1], expert_parallel_buffers=ours[1:])
    with mock.patch.object(gradients, "_PART", 7):
        scale_at_full_bandwidth(wrapped)
        for one, other in zip(ours, theirs, strict=True):
            one.scale_gradients(factor)
            _ParamAndGradBuffer.scale_gradients(other, factor)
            assert torch.equal(one.grad_data, other.grad_data)
            assert torch.equal(one.extra_main_grads[0], other.extra_main_grads[0])
