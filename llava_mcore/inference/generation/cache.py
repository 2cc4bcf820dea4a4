"""Keys and values of the tokens so far, of several sequences at once.

megatron-core's StaticInferenceContext has one length for all sequences, keeps keys without their rotary positions and
rotates all of them again for every token, and switches masks off, so windows too. Here a layer's core attention is
replaced while tokens are generated. It gets queries and keys that are already rotated, from torch's layers as well as
from Transformer Engine's.

r: sequences (rows), s: tokens, n: heads, g: query groups, d: head size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from llava_mcore.models.attention import SDPAttention
from llava_mcore.models.multimodal import VisionLanguageModel

PIECE = 256
"""The capacity of a cache, in tokens, is a multiple of this."""


class CachedRows:
    """The state of the sequences, for the caches of all layers.

    `prefilled`: the row whose prompt is being read; None while every row gets one token. `lengths`: int64 [r] on the
    device, tokens of each row before this pass. `longest`: the largest of them.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.prefilled: int | None = None
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.longest = 0


class CachedAttention(SDPAttention):
    """Core attention that keeps keys and values [r, g, s, d]; a prompt is read as in training."""

    def __init__(self, config: TransformerConfig, layer_number: int, softcap: float | None, rows: CachedRows) -> None:
        super().__init__(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            attention_dropout=0.0,
            softmax_scale=config.softmax_scale,
            softcap=softcap,
        )
        self.rows = rows
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend to all tokens of the same row so far.

        Args:
            query, key, value: [s, 1, n or g, d]; a prompt of s tokens, or one token of each of s >= r rows.

        Returns:
            [s, 1, n * d]; zeros for tokens beyond the last row.
        """
        row = self.rows.prefilled
        if row is None:
            return self._next_tokens(query, key, value)
        keys, values = self._reserved(len(key), key)
        keys[row, :, : len(key)] = key[:, 0].transpose(0, 1)
        values[row, :, : len(key)] = value[:, 0].transpose(0, 1)
        return self._attend(query, key, value)

    def _next_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_rows, lengths, end = self.rows.num_rows, self.rows.lengths, self.rows.longest + 1
        keys, values = self._reserved(end, key)
        each = torch.arange(num_rows, device=key.device)
        keys[each, :, lengths] = key[:num_rows, 0]
        values[each, :, lengths] = value[:num_rows, 0]
        columns = torch.arange(end, device=key.device)
        seen = columns <= lengths[:, None]
        if self.window is not None:
            seen &= columns > lengths[:, None] - self.window
        groups = keys.shape[1]
        # The heads of a group are treated as tokens, so keys and values need not be repeated.
        q = query[:num_rows, 0].unflatten(1, (groups, -1))  # [r, g, n / g, d]
        k, v, mask = keys[:, :, :end], values[:, :, :end], seen[:, None, None]
        if self.softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        else:
            out = self._capped(q, k, v, self.softcap, mask, 0.0)
        return F.pad(out.flatten(1)[:, None], (0, 0, 0, 0, 0, len(query) - num_rows))

    def _reserved(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values with room for a number of tokens."""
        if self.keys is None or self.values is None or self.keys.shape[2] < length:
            room = math.ceil(length / PIECE) * PIECE
            shape = (self.rows.num_rows, like.shape[2], room, like.shape[3])
            self.keys, self.values = (_grown(x, like.new_zeros(shape)) for x in (self.keys, self.values))
        return self.keys, self.values


def _grown(before: Tensor | None, larger: Tensor) -> Tensor:
    """Copy what is in a cache into a larger one."""
    if before is not None:
        larger[:, :, : before.shape[2]] = before
    return larger


@contextlib.contextmanager
def cached_rows(models: Sequence[VisionLanguageModel], num_rows: int, device: torch.device) -> Iterator[CachedRows]:
    """Let the layers of a model's chunks on this rank keep keys and values until the end of the context."""
    rows = CachedRows(num_rows, device)
    layers = [(model, layer) for model in models for layer in model.language_model.decoder.layers]
    before = [layer.self_attention.core_attention for _, layer in layers]
    for model, layer in layers:
        softcap = model.language_model.shape.attention_softcap
        cached = CachedAttention(model.config, layer.layer_number, softcap, rows)
        layer.self_attention.core_attention = cached.eval()
    try:
        yield rows
    finally:
        for (_, layer), attention in zip(layers, before, strict=True):
            layer.self_attention.core_attention = attention
