"""A core attention for megatron-core's local (non Transformer Engine) layers on torch's SDPA.

megatron-core's own unfused attention keeps the whole [b, n, s, s] score matrix and does not support packed sequences.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from llava_mcore.models.attention.context import attend_chunks
from llava_mcore.parallel.batch import PackedSamples

LARGEST_MASK = 1 << 26
"""Queries x keys of the largest mask that is made: 8,192 tokens."""
LONGEST_HEAD = 256
"""Head size up to which torch's kernel for packed sequences exists."""


def sees_window(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether this layer (counted from 1) only sees config.window_size."""
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)


class SDPAttention(MegatronModule):
    """Causal or full attention with grouped queries; packed sequences attend within themselves only.

    Layers with a sliding window attend only within it. `softcap`: see DecoderShape. Cross-attention may have
    other lengths of keys than of queries, also packed.

    Drop-in for megatron-core's DotProductAttention. s: sequence, b: batch, t: packed tokens, n: heads,
    g: query groups, d: head size.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        softcap: float | None = None,
        **_: Any,  # arguments that only other back ends use
    ) -> None:
        super().__init__(config=config)
        self.cp_group: dist.ProcessGroup | None = None
        if pg_collection is not None and config.context_parallel_size > 1:
            self.cp_group = pg_collection.cp
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.softcap = softcap
        self.window = config.window_size[0] + 1 if sees_window(config, layer_number) else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [s, b, n*d] for [s, b, n or g, d]; [t, n*d] for packed [t, n or g, d]."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("SDPAttention takes no explicit mask: causality and packing define it")
        if self.cp_group is not None:
            with self._own_random_numbers():
                return self._of_chunks(query, key, value, packed_seq_params, self.cp_group)
        if self._is_fused(query, packed_seq_params):
            return self._fused(query, key, value, packed_seq_params)
        with self._own_random_numbers():
            if packed_seq_params is not None:
                return self._packed(query, key, value, packed_seq_params)
            return self._attend(query, key, value)

    def _of_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams | None, group: dist.ProcessGroup
    ) -> Tensor:
        """As `forward`, of this context-parallel rank's tokens; a collective call."""
        if params is None:
            return attend_chunks(query, key, value, [0, group.size() * len(query)], None, group, self._attend)
        assert params.cu_seqlens_q_padded is None, "padding is a part of its sample"
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        bounds = _bounds(params, params.cu_seqlens_q)
        return attend_chunks(query, key, value, bounds, params.cu_seqlens_q, group, self._attend).squeeze(1)

    def _is_fused(self, query: Tensor, params: PackedSeqParams | None) -> bool:
        """Return whether torch's kernel for packed sequences computes this, instead of one call per sequence."""
        if not self._has_kernel(query):
            return False
        if params is None:
            return self.window is not None and query.shape[0] > self.window
        return params.cu_seqlens_kv is params.cu_seqlens_q

    def _has_kernel(self, query: Tensor) -> bool:
        """Return whether torch's kernel for packed sequences takes such queries: in half precision on GPUs."""
        if not self.causal or self.softcap is not None or (self.dropout and self.training):
            return False
        in_half = query.dtype in (torch.bfloat16, torch.float16)
        return query.device.type == "cuda" and in_half and query.shape[-1] <= LONGEST_HEAD

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams | None) -> Tensor:
        if params is None:
            return attend_rows(query, key, value, scale=self.scale, window=self.window)
        padded = params.cu_seqlens_q_padded
        bounds = params.cu_seqlens_q if padded is None else padded
        longest = params.max_seqlen_q
        return attend_packed(query, key, value, bounds, longest, scale=self.scale, window=self.window)

    def _own_random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Make tensor-parallel ranks, which have different heads, use different dropout masks.

        With sequence parallelism, TransformerBlock already does so for all of its layers; a second fork would start
        from the same state as the first one and repeat its numbers.
        """
        if self.dropout and self.training and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams) -> Tensor:
        asking, seen = (
            [slice(a, b) for a, b in pairwise(_bounds(params, bounds if padded is None else padded))]
            for bounds, padded in (
                (params.cu_seqlens_q, params.cu_seqlens_q_padded),
                (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
            )
        )
        parts = [
            self._attend(query[x, None], key[y, None], value[y, None]).squeeze(1)
            for x, y in zip(asking, seen, strict=True)
            if x.stop > x.start
        ]
        tail = query.shape[0] - asking[-1].stop  # padding outside every sample
        if tail:
            parts.append(query.new_zeros(tail, query.shape[1] * query.shape[2]))
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [q, b, n*d] for [q, b, n, d] and [k, b, g, d]; the queries are the last ones if this is causal.

        No large mask is made, because it would be kept until the backward pass.
        """
        before = len(key) - len(query)
        if before and self._has_kernel(query):
            return attend_rows(query, key, value, scale=self.scale, window=self.window)
        if not self.causal or len(query) * len(key) <= LARGEST_MASK:
            return self._attend_masked(query, key, value)
        if self.window is not None and len(key) > self.window:
            # As many queries as a window has keys, which see twice as many.
            blocks = [(start, min(start + self.window, len(query))) for start in range(0, len(query), self.window)]
            seen = [slice(max(0, before + start + 1 - self.window), before + end) for start, end in blocks]
            parts = [
                self._attend_masked(query[start:end], key[keys], value[keys])
                for (start, end), keys in zip(blocks, seen, strict=True)
            ]
            return torch.cat(parts)
        if before and self.softcap is None:
            # Extra queries for the earlier keys, whose results are dropped, make plain causal attention work without a
            # mask.
            padded = F.pad(query, (0, 0, 0, 0, 0, 0, before, 0))
            return self._attend_masked(padded, key, value)[before:]
        return self._attend_masked(query, key, value)

    def _attend_masked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, n, s, d]
        dropout = self.dropout if self.training else 0.0
        mask = self._mask(q.shape[2], k.shape[2], q.device)
        if self.softcap is not None:
            return self._capped(q, k, v, self.softcap, mask, dropout).permute(2, 0, 1, 3).flatten(2)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Return the keys that a query sees, [queries, keys]: its own, which are the last ones, and those before it;
        with a window only the nearest. None: all keys, or those before it where there are as many of both."""
        has_window = self.window is not None and num_keys > self.window
        if not has_window and (num_queries == num_keys or not self.causal):
            return None
        before = num_keys - num_queries
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(before)
        return mask.triu(before + 1 - self.window) if has_window and self.window is not None else mask

    def _capped(self, q: Tensor, k: Tensor, v: Tensor, cap: float, mask: Tensor | None, dropout: float) -> Tensor:
        """Return [b, n, s, d] for scores x that become cap * tanh(x / cap) (Gemma 2); holds [b, n, s, s]."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.tanh(q @ k.transpose(2, 3) * self.scale / cap) * cap
        if self.causal:
            seen = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
            scores = scores.masked_fill(~seen, float("-inf"))
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        return F.dropout(weights, dropout) @ v


def _bounds(params: PackedSeqParams, on_device: Tensor) -> Sequence[int]:
    """Return the bounds of packed sequences; the host waits for the device where only that knows them."""
    if isinstance(params, PackedSamples):
        return params.bounds
    values: list[int] = on_device.tolist()
    return values


def as_sequences(x: Tensor) -> Tensor:
    """Return samples [s, b, ...] as packed sequences [b * s, ...]."""
    return x.transpose(0, 1).flatten(0, 1)


def bounds_of_samples(x: Tensor) -> Tensor:
    """Return the bounds of such sequences, int32 [b + 1]."""
    s, b = x.shape[:2]
    return torch.arange(0, b * s + 1, s, dtype=torch.int32, device=x.device)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Return [s, b, n*d] for [s, b, n, d] and keys, values [k, b, g, d], of which the queries are the last tokens."""
    s, b = q.shape[:2]
    bounds, of_keys = bounds_of_samples(q), (bounds_of_samples(k), len(k))
    q, k, v = (as_sequences(x) for x in (q, k, v))
    out = attend_packed(q, k, v, bounds, s, scale=scale, window=window, of_keys=of_keys)
    return out.unflatten(0, (b, s)).transpose(0, 1)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
    of_keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return [t, n*d] for [t, n or g, d].

    Args:
        bounds: int32 [sequences + 1], the last of which is t.
        longest: length of the longest sequence.
        of_keys: bounds and longest length of the keys of each sequence, of which the queries are the last tokens; None:
            as many as queries.
    """
    key_bounds, most_keys = (bounds, longest) if of_keys is None else of_keys
    # A window is counted from the last key, in FlashAttention alone; cuDNN's causality begins at the first one.
    all_keys = -1 if of_keys is None else most_keys
    seen = (all_keys if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, bounds, key_bounds, longest, most_keys, scale=scale, window_size=seen)
    assert isinstance(out, Tensor)
    return out.flatten(1)
