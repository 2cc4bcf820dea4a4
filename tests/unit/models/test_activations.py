"""Activations that are modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llava_mcore.models.activations import StatelessActivation


class WithState(nn.Module):
    """As Transformer Engine's operations are."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: Tensor) -> None:
        raise AssertionError("there is none")


def test_a_stateless_activation_computes_and_saves_nothing() -> None:
    mlp = nn.Sequential(nn.Linear(2, 2), WithState())
    assert "1._extra_state" in mlp.state_dict()
    mlp[1] = StatelessActivation(mlp[1])
    assert set(mlp.state_dict()) == {"0.weight", "0.bias"}
    assert torch.equal(mlp[1](torch.ones(2)), torch.full((2,), 2.0))
