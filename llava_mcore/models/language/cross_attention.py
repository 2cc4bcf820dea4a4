"""Layers that attend to the features of images in place of the tokens, scaled by gates (Mllama; Flamingo, arXiv
2204.14198).

Features are not tokens of the sequence. They are passed as `context`, and which tokens see which of them as
`context_mask`; megatron-core hands both to every layer, also through recomputation. megatron-core's CrossAttention
(0.19.2) has no groups of query heads, no norms of heads and no gates.

s: tokens, b: samples, t: tokens of all samples, b * s, h: hidden size, f: features of all images, n: heads, g: query
groups, d: head size; n and g are those of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from llava_mcore.models.language.layers import column_linear, row_linear

_OF_ATTENTION = "input_layernorm."


class TanhGate(nn.Module):
    """Takes the place of megatron-core's bias-dropout-add: residual + tanh(gate) * (x + bias); no dropout."""

    def __init__(self, dtype: torch.dtype, sequence_parallel: bool, **_: Any) -> None:  # some get a `config` too
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1, dtype=dtype))
        vars(self.gate)["sequence_parallel"] = sequence_parallel  # megatron-core sums these gradients over ranks

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return a function of ((x [s, b, h], bias [h] or None), residual [s, b, h], dropout)."""

        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = x_with_bias
            return residual + self.gate.tanh() * (x if bias is None else x + bias)

        return add


def gate_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a gate, closed at first."""
    return ModuleSpec(
        module=TanhGate, params={"dtype": config.params_dtype, "sequence_parallel": config.sequence_parallel}
    )


class HeadNorm(nn.Module):
    """RMSNorm of each head.

    Every tensor-parallel rank has different heads, so gradients of the weight must be summed over ranks.
    """

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.adds_up_itself = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel  # megatron-core adds these up

    def forward(self, x: Tensor) -> Tensor:
        """Return heads [..., d] normalized in fp32, as transformers rounds it."""
        weight = self.weight
        if self.adds_up_itself:
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * normed.to(x.dtype)


class MaskedAttention(nn.Module):
    """Attention of tokens to the features that they see."""

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None, seen: Tensor) -> Tensor:
        """Return [t, n * d].

        Args:
            query: [t, n, d].
            key, value: [f + 1, g, d]; None only while text is generated, when they are kept elsewhere.
            seen: bool [t, f + 1]; every token sees something.
        """
        assert key is not None and value is not None, "generation replaces this module"
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None], enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class CrossAttention(MegatronModule):
    """Attention whose keys and values are features of images; tokens have no positions here."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        size, width = config.kv_channels, config.hidden_size
        assert size is not None and config.num_query_groups is not None
        # Features are whole on every rank, also where ranks divide the tokens.
        of_features = copy(config)
        of_features.sequence_parallel = False
        self.linear_q = column_linear(config, width, config.num_attention_heads * size)
        self.linear_k = column_linear(of_features, width, config.num_query_groups * size)
        self.linear_v = column_linear(of_features, width, config.num_query_groups * size)
        self.q_layernorm, self.k_layernorm = HeadNorm(config, size), HeadNorm(config, size)
        self.core_attention: nn.Module = MaskedAttention()
        self.linear_proj = row_linear(config, config.num_attention_heads * size, width)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, key_value_states: Tensor | None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [s, b, h] and no bias, of [s, b, h]; with sequence parallelism s is the rank's.

        Args:
            attention_mask: bool [t, f + 2], see `seen_features`.
            key_value_states: [f + 1, h].
        """
        query, _bias = self.linear_q(hidden_states)
        b, size = query.shape[1], self.config.kv_channels
        heads = query.transpose(0, 1).flatten(0, 1).unflatten(-1, (-1, size))  # [t, n, d]
        key = value = None
        if key_value_states is not None:
            key, value = (x(key_value_states)[0].unflatten(-1, (-1, size)) for x in (self.linear_k, self.linear_v))
            key = self.k_layernorm(key)
        attended = self.core_attention(self.q_layernorm(heads), key, value, attention_mask[:, :-1])
        output, bias = self.linear_proj(attended.unflatten(0, (b, -1)).transpose(0, 1).contiguous())
        return output, bias


class CrossAttentionLayer(TransformerLayer):
    """A layer of gated attention to images and a gated MLP, which tokens that see no image skip."""

    def forward(
        self, hidden_states: Tensor, context: Tensor | None = None, context_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [s, b, h] ([s / tp, b, h] with sequence parallelism), and `context` as it came.

        Args:
            context: features [f + 1, h], the last of them zero; None while text is generated.
            context_mask: bool [t, f + 2], see `seen_features`.
        """
        assert context_mask is not None, "the model says what tokens see"
        attended, _ = self._forward_attention(hidden_states, context=context, context_mask=context_mask)
        rows = context_mask[:, -1].unflatten(0, (hidden_states.shape[1], -1)).t()[..., None]  # [s, b, 1]
        if self.config.sequence_parallel:
            rows = tensor_parallel.scatter_to_sequence_parallel_region(rows.to(hidden_states.dtype)).bool()
        return torch.where(rows, self._forward_mlp(attended), attended), context


def cross_layer(spec: ModuleSpec, norm: Any, config: TransformerConfig) -> ModuleSpec:
    """Return a layer that attends to images in place of the tokens, else like `spec`."""
    layer = spec.submodules
    names = {name: saved for name, saved in layer.sharded_state_dict_keys_map.items() if name != _OF_ATTENTION}
    gate = gate_spec(config)
    submodules = replace(
        layer,
        input_layernorm=IdentityOp,
        self_attention=IdentityOp,
        self_attn_bda=IdentityFuncOp,
        pre_cross_attn_layernorm=norm,
        cross_attention=CrossAttention,
        cross_attn_bda=gate,
        mlp_bda=gate,
        sharded_state_dict_keys_map=names,
    )
    return replace(spec, module=CrossAttentionLayer, submodules=submodules)


def image_context(
    features: Tensor, positions: Tensor, real: Tensor, input_ids: Tensor, params: PackedSeqParams | None
) -> dict[str, Tensor]:
    """Return `context` and `context_mask` of a micro-batch.

    Args:
        features: [f, h].
        positions, real: see `seen_features`.
        input_ids: [b, s].
        params: where packed samples begin; None: each row is one.
    """
    b, s = input_ids.shape
    bounds = torch.arange(0, b * s + 1, s, device=input_ids.device) if params is None else params.cu_seqlens_q
    assert bounds is not None
    zero = features.new_zeros(1, features.shape[1])
    return {"context": torch.cat([features, zero]), "context_mask": seen_features(positions, real, bounds, b * s)}


def seen_features(positions: Tensor, real: Tensor, bounds: Tensor, num_tokens: int) -> Tensor:
    """Return which features each token sees, bool [t, f + 2], as transformers' processor and model say; no host sync.

    A token sees the last group of adjacent images before it. A token before the first image of its sample reads all
    images of the sample, padding included, but skips the MLPs. Samples without images see a feature of zeros, the last
    but one column, so that attention adds nothing. The last column says whether a token goes through the MLPs.

    Args:
        positions: int64 [images], the token of each image, in the flattened [b * s].
        real: bool [images, features of an image], which of them are not padding.
        bounds: [samples + 1], where samples begin in the flattened [b * s], and its end.
        num_tokens: t.
    """
    tokens = torch.arange(num_tokens, device=positions.device)
    samples = torch.searchsorted(bounds[1:].to(tokens.dtype), tokens, right=True)
    owners = samples[positions]
    # Images side by side in a sample are one group; every token belongs to the group that began last.
    apart = (positions[1:] != positions[:-1] + 1) | (owners[1:] != owners[:-1])
    groups = F.pad(apart.long(), (1, 0), value=1).cumsum(0)[: len(positions)]
    latest = F.pad(groups, (1, 0))[torch.searchsorted(positions, tokens, right=True)]
    before = (positions <= tokens[:, None]) & (owners == samples[:, None])  # [t, images]
    sees, in_sample = before & (groups == latest[:, None]), owners == samples[:, None]
    reads = sees.any(1)
    seen = (sees[..., None] & real) | (in_sample & ~reads[:, None])[..., None]
    return torch.cat([seen.flatten(1), ~in_sample.any(1, keepdim=True), reads[:, None]], dim=1)
