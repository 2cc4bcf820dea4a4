"""Attention of packed samples for transformers: each attends only to itself, without a mask and without padding.

Hugging Face leaves this to the package flash-attn. Where that is missing, as on our machines, the fastest kernel is
cuDNN's, which Transformer Engine calls; then the one of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "packed_flash"
"""For `attn_implementation`. Qwen's vision tower hands over its windows as one pack only to what is called flash."""


SHORT = 256
"""Packs of shorter sequences, a tower's windows, go to torch's kernel: for many of them cuDNN's takes far longer."""


class Packs(NamedTuple):
    """Where the samples of the only row begin, int32 [samples + 1] on its device, and the tokens of the longest."""

    cu_seqlens: Tensor
    max_seqlen: int


Kernel = Callable[[Tensor, Tensor, Tensor, Packs, float, bool], Tensor]
"""Query, key and value [s, heads, d], where samples begin, scale, causal -> [s, heads * d]."""


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers. It takes the argument `packs` of a model's forward."""
    AttentionInterface.register(NAME, torch.compiler.disable(_attention))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packs: Packs | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query, key, value [1, heads, s, d] -> [1, s, heads, d].

    A tower says by `cu_seq_lens_q` and `max_length_q` what is packed, a decoder is told by `packs`.
    """
    if cu_seq_lens_q is not None and max_length_q is not None:
        packs = Packs(cu_seq_lens_q, max_length_q)
    assert packs is not None and attention_mask is None
    causal = bool(module.is_causal) if is_causal is None else is_causal
    _, kernel = chosen(query.device.type)
    if query.device.type == "cuda" and packs.max_seqlen <= SHORT:
        kernel = _torch_varlen
    rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    return kernel(*rows, packs, scaling, causal).view(1, query.shape[2], query.shape[1], -1), None


@cache
def chosen(device_type: str) -> tuple[str, Kernel]:
    """Return the best kernel that there is, with its name."""
    if device_type != "cuda":
        return "one sample after another", _one_by_one
    try:
        import transformer_engine.pytorch as te
    except ImportError:
        return "torch's varlen_attn", _torch_varlen
    return "cuDNN's for packs, by Transformer Engine (of windows: torch's varlen_attn)", _TransformerEngine(te)


class _TransformerEngine:
    """Keeps one of Transformer Engine's modules for each shape of attention."""

    def __init__(self, te: Any) -> None:
        self._te = te
        self._modules: dict[tuple[Any, ...], Any] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packs: Packs, scale: float, causal: bool) -> Tensor:
        key = (q.shape[1], k.shape[1], q.shape[2], scale, causal)
        if key not in self._modules:
            self._modules[key] = self._te.DotProductAttention(
                q.shape[1],
                q.shape[2],
                num_gqa_groups=k.shape[1],
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal" if causal else "padding",
                softmax_scale=scale,
            )
        return self._modules[key](
            q,
            k,
            v,
            cu_seqlens_q=packs.cu_seqlens,
            cu_seqlens_kv=packs.cu_seqlens,
            max_seqlen_q=packs.max_seqlen,
            max_seqlen_kv=packs.max_seqlen,
        )


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, packs: Packs, scale: float, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    bounds, longest, window = packs.cu_seqlens, packs.max_seqlen, (-1, 0 if causal else -1)
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=window).flatten(1)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, packs: Packs, scale: float, causal: bool) -> Tensor:
    lengths = packs.cu_seqlens.diff().tolist()
    samples = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)), strict=True)
    found = [scaled_dot_product_attention(*x, is_causal=causal, scale=scale, enable_gqa=True) for x in samples]
    return torch.cat(found, dim=2)[0].transpose(0, 1).flatten(1)
