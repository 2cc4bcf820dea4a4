"""Rotary angles of tokens at any positions.

s: tokens, d: rotated dims of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from llava_mcore.models.language.decoder import LanguageModel
from llava_mcore.models.language.layers import TwoRopeSelfAttention


class TokenAngles:
    """A language model's rotary angles by position, and those of its layers with other frequencies."""

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self._embedding = model.rotary_pos_emb
        shape = model.shape
        self._frequencies: tuple[Tensor, Tensor] | None = None
        """Rotary frequencies of all layers, and those of the sliding-window layers, if they differ."""
        if shape.local_rope is not None:
            self._frequencies = shape.rope.inv_freq.to(device), shape.local_rope.inv_freq.to(device)
        attentions = [layer.self_attention for layer in model.decoder.layers]
        self._local_layers = [x for x in attentions if isinstance(x, TwoRopeSelfAttention) and x.local_rope is not None]

    @contextlib.contextmanager
    def of(self, position_ids: Tensor) -> Iterator[Tensor]:
        """Return the angles [s, 1, 1, d] of one row, positions int64 [1, s] or [axes, 1, s].

        In the context, layers with frequencies of their own take the angles of these positions.
        """
        if self._frequencies is None:
            yield self._embedding(position_ids)
            return
        shared, local = (_angles(position_ids, x) for x in self._frequencies)
        for layer in self._local_layers:
            layer.local_angles = local
        try:
            yield shared
        finally:
            for layer in self._local_layers:
                layer.local_angles = None


def _angles(position_ids: Tensor, inv_freq: Tensor) -> Tensor:
    """Return angles float32 [s, 1, 1, d], as megatron-core's RotaryEmbedding computes them."""
    angles = torch.outer(position_ids[0].float(), inv_freq)
    return torch.cat((angles, angles), dim=-1)[:, None, None]
