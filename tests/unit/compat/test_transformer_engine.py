"""Which passes use Transformer Engine's user buffers, on stand-ins for its layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llava_mcore.compat.transformer_engine import overlap_full_passes


class Linear(nn.Module):
    """Has the settings of a layer, and notes them in every pass."""

    def __init__(self, *, column: bool) -> None:
        super().__init__()
        self.ub_overlap_ag_fprop, self.ub_bulk_dgrad, self.ub_overlap_rs_fprop = column, column, not column
        self.seen: list[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.settings)
        return x

    @property
    def settings(self) -> list[bool]:
        return [self.ub_overlap_ag_fprop, self.ub_bulk_dgrad, self.ub_overlap_rs_fprop]


class Decoder(nn.Module):
    """Takes the hidden states of the stage before if it is given none, as megatron-core's."""

    def __init__(self) -> None:
        super().__init__()
        self.column, self.row = Linear(column=True), Linear(column=False)
        self.input_tensor: Tensor | None = None

    def forward(self, hidden_states: Tensor | None) -> Tensor:
        hidden = self.input_tensor if hidden_states is None else hidden_states
        assert hidden is not None
        return torch.as_tensor(self.row(self.column(hidden)))


def test_only_passes_of_the_buffers_size_use_them() -> None:
    decoder = Decoder()
    overlap_full_passes(decoder, 8)
    decoder(hidden_states=torch.zeros(8, 1, 4))
    decoder(hidden_states=torch.zeros(6, 1, 4))
    assert decoder.column.settings == [True, True, False] and decoder.row.settings == [False, False, True]
    decoder.input_tensor = torch.zeros(4, 1, 4)
    decoder(hidden_states=None)
    decoder.input_tensor = torch.zeros(8, 1, 4)
    decoder(hidden_states=None)
    off, on = [False] * 3, [True, True, False]
    assert decoder.column.seen == [on, off, off, on]
    assert decoder.row.seen == [[False, False, True], off, off, [False, False, True]]
