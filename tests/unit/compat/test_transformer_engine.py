"""Which passes use Transformer Engine's user buffers, on stand-ins for its layers at tp 2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llava_mcore.compat.transformer_engine import overlap_full_passes


class Linear(nn.Module):
    """Has the settings of a layer, and notes them in every pass. The first of two takes half of the tokens."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.parallel_mode = mode
        self.ub_overlap_ag_fprop, self.ub_bulk_dgrad = mode == "column", mode == "column"
        self.ub_overlap_rs_fprop = mode == "row"
        self.seen: list[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append([self.ub_overlap_ag_fprop, self.ub_bulk_dgrad, self.ub_overlap_rs_fprop])
        return torch.cat([x, x]) if self.parallel_mode == "column" else x[: len(x) // 2]


OFF, COLUMN, ROW = [False] * 3, [True, True, False], [False, False, True]


def mlp() -> nn.Sequential:
    """Two matrices whose full passes have 16 tokens."""
    decoder = nn.Sequential(Linear("column"), Linear("row"))
    overlap_full_passes(decoder, 16, 2)
    return decoder


def seen_by(decoder: nn.Sequential) -> list[list[list[bool]]]:
    """Return the settings of both in every pass."""
    return [linear.seen for linear in decoder if isinstance(linear, Linear)]


def test_only_passes_of_the_buffers_size_use_them() -> None:
    decoder = mlp()
    for tokens in (8, 6, 4, 8):
        decoder(torch.zeros(tokens, 1, 4))
    assert seen_by(decoder) == [[COLUMN, OFF, OFF, COLUMN], [ROW, OFF, OFF, ROW]]


def test_a_recomputed_pass_does_as_it_did_before() -> None:
    """Also where a pass of another size came in between, as in a pipeline."""
    decoder = mlp()
    short, full = (torch.zeros(tokens, 1, 4, requires_grad=True) for tokens in (6, 8))
    results = [checkpoint(decoder, x, use_reentrant=True) for x in (short, full)]
    for result in results:
        result.sum().backward()
    assert seen_by(decoder) == [[OFF, COLUMN, OFF, COLUMN], [OFF, ROW, OFF, ROW]]
