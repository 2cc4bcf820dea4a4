"""Gated delta nets: the linear attention of Qwen3.5 (arXiv 2412.06464), as transformers computes it.

megatron-core's module has the parameters and their places in checkpoints. Its forward pass is not used: it has no state
for generation, waits for the device in every layer, refuses packs where it is deterministic, and takes exp(A_log) in
the parameters' precision, where transformers takes it in float32.

s: tokens, b: samples, h: hidden size, n: value heads, g: key heads, k and v: sizes of a key's and a value's head,
c: 2 * g * k + n * v, what the convolution reads. All numbers of heads are those of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.compat.delta_rule import building_without_kernels, fla_kernels, has_fla, torch_rule
from llava_mcore.config.rules.delta_nets import MISSING_KERNELS
from llava_mcore.errors import ConfigError
from llava_mcore.parallel.batch import PackedSamples
from llava_mcore.parallel.context import DividedRow, HeadExchange
from llava_mcore.parallel.groups import context_parallel_group

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Hugging Face's linear layers that are one in megatron-core, in its order."""


def uses_kernels(x: Tensor, deterministic: bool) -> bool:
    """Return whether flash-linear-attention computes on a tensor: its results are not the same in every run."""
    return x.device.type == "cuda" and not deterministic


class GatedNorm(nn.Module):
    """RMSNorm of each value head, times silu(gate). Unlike the other norms of Qwen3.5, its weight is not zero-centered.

    Every tensor-parallel rank has different heads, so gradients of the weight must be summed over ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.deterministic = config.deterministic_mode
        self.adds_up_itself = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel  # megatron-core adds these up

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return [b, s, n, v] of two tensors of that shape, in torch as transformers rounds it."""
        weight = self.weight
        if self.adds_up_itself:
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight)
        if uses_kernels(x, self.deterministic):
            out: Tensor = fla_kernels().gated_norm(x, gate.contiguous(), weight, None, eps=self.eps)
            return out
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (weight * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


class DeltaRule(nn.Module):
    """The convolution and the gated delta rule of packed sequences, each of which begins without a state.

    On a GPU flash-linear-attention's kernels compute it, unless the results must be the same in every run.
    """

    divides_heads = True
    """Whether context-parallel ranks have a part of the heads each."""

    def __init__(self, key_heads: int, key_head_dim: int, value_head_dim: int, *, deterministic: bool) -> None:
        super().__init__()
        self.key_heads, self.key_head_dim, self.value_head_dim = key_heads, key_head_dim, value_head_dim
        self.deterministic = deterministic

    def forward(
        self,
        mixed: Tensor,
        weight: Tensor,
        decay: Tensor,
        beta: Tensor,
        bounds: Tensor | None,
        host_bounds: Sequence[int] = (),
    ) -> Tensor:
        """Return what is attended to, [b, s, n, v].

        Args:
            mixed: queries, keys and values before the convolution, [b, s, c].
            weight: of the convolution, [c, width].
            decay: logarithm of the factor by which a token shrinks the state, float32 [b, s, n].
            beta: how much of its value a token writes, [b, s, n].
            bounds: int32 [sequences + 1], where the sequences of the only row begin, and its length; None: each row is
                one sequence.
            host_bounds: their values; empty: unknown, so that torch's operations wait for the device to tell them.
        """
        if uses_kernels(mixed, self.deterministic):
            return self._by_kernels(mixed, weight, decay, beta, bounds)[0]
        ends = [0, mixed.shape[1]] if bounds is None else host_bounds or bounds.tolist()
        if ends[-1] != mixed.shape[1]:
            raise ValueError(f"sequences end at token {ends[-1]} of {mixed.shape[1]}")
        spans = [slice(a, b) for a, b in pairwise(ends) if b > a]
        parts = [self.of_sequence(mixed[:, x], weight, decay[:, x], beta[:, x])[0] for x in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def of_sequence(
        self, mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor, *, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is attended to in rows of one sequence, and the state float32 [b, n, k, v] after each."""
        if uses_kernels(mixed, self.deterministic):
            return self._by_kernels(mixed, weight, decay, beta, None, with_state=with_state)
        width = weight.shape[1]
        padded = F.pad(mixed.transpose(1, 2), (width - 1, 0))
        mixed = F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2)
        query, key, value = self.repeated(*self.heads(mixed))
        out, state = torch_rule()(
            query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=with_state
        )
        return out, state

    def _by_kernels(
        self,
        mixed: Tensor,
        weight: Tensor,
        decay: Tensor,
        beta: Tensor,
        bounds: Tensor | None,
        *,
        with_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `of_sequence`, of packed sequences too; several value heads share a key head without copies."""
        kernels = fla_kernels()
        mixed, _ = kernels.convolve(x=mixed.contiguous(), weight=weight, activation="silu", cu_seqlens=bounds)
        options = {"use_qk_l2norm_in_kernel": True, "output_final_state": with_state, "cu_seqlens": bounds}
        query, key, value = (x.contiguous() for x in self.heads(mixed))
        out, state = kernels.rule(query, key, value, g=decay, beta=beta.contiguous(), **options)
        return out, state

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [b, s, g, k] and values [b, s, n, v] of [b, s, c]."""
        of_keys = self.key_heads * self.key_head_dim
        query, key, value = mixed.split([of_keys, of_keys, mixed.shape[-1] - 2 * of_keys], dim=-1)
        query, key = (x.unflatten(-1, (self.key_heads, -1)) for x in (query, key))
        return query, key, value.unflatten(-1, (-1, self.value_head_dim))

    def repeated(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys for every value head, [b, s, n, k]: several of them share one."""
        times = value.shape[2] // self.key_heads
        return query.repeat_interleave(times, dim=2), key.repeat_interleave(times, dim=2), value


class DeltaNet(GatedDeltaNet):
    """A gated delta net in place of a layer's attention."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        on_gpu = not config.use_cpu_initialization
        if on_gpu and not config.deterministic_mode and not has_fla():
            raise ConfigError(MISSING_KERNELS)
        with building_without_kernels(on_cpu=config.use_cpu_initialization):
            super().__init__(config, *args, **kwargs)
        # Context-parallel ranks have a part of the tokens, but compute the rule of all tokens for a part of the heads.
        self.num_contexts = config.context_parallel_size
        *of_rule, of_gate, of_beta, of_alpha = self.in_proj_split_sections
        self.parts = (sum(of_rule), of_gate, of_beta, of_alpha)
        """Columns of what the rule reads, of the gate, and of what beta and decay are computed from."""
        self.delta_rule = DeltaRule(
            self.num_k_heads_local_tp // self.num_contexts,
            self.key_head_dim,
            self.value_head_dim,
            deterministic=config.deterministic_mode,
        )
        # The rows of both are divided section by section.
        sections = tuple(x * self.tp_size for x in self.in_proj_split_sections)
        vars(self.in_proj.weight)["partition_sections"] = sections
        vars(self.conv1d.weight)["partition_sections"] = sections[:3]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,  # rotary positions, and what megatron-core's inference needs
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [s, b, h] and no bias, of [s, b, h]; with sequence parallelism s is the rank's."""
        projected, _bias = self.in_proj(hidden_states)
        mixed, gate, beta, alpha = projected.transpose(0, 1).split(self.parts, dim=-1)
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        rule = self._rule_of_heads if self.num_contexts > 1 and self.delta_rule.divides_heads else self.delta_rule
        attended = rule(
            mixed, self.conv1d.weight.squeeze(1), decay, beta.sigmoid(), *sequence_bounds(packed_seq_params)
        )
        normed = self.out_norm(attended, gate.unflatten(-1, (-1, self.value_head_dim)))
        output, bias = self.out_proj(normed.flatten(2).transpose(0, 1).contiguous())
        return output, bias

    def _rule_of_heads(
        self,
        mixed: Tensor,
        weight: Tensor,
        decay: Tensor,
        beta: Tensor,
        bounds: Tensor | None,
        host_bounds: Sequence[int],
    ) -> Tensor:
        """As `DeltaRule.forward`, of this context-parallel rank's tokens; a collective call. bounds: of whole
        sequences."""
        group, cp = context_parallel_group(), self.num_contexts
        exchange = HeadExchange(DividedRow.of(mixed.shape[1], bounds, mixed.device, group).rows, group)
        # Of queries, keys and values the part of each rank's heads, [s, b, cp, c / cp]; then those two of value heads.
        sections = self.in_proj_split_sections[:3]
        of_ranks = torch.cat([x.unflatten(-1, (cp, -1)) for x in mixed.split(sections, dim=-1)], dim=-1)
        gates = torch.stack([decay, beta.to(decay.dtype)], dim=-1).unflatten(2, (cp, -1)).flatten(3)
        mixed, gates = (exchange.to_heads(x.transpose(0, 1)).squeeze(2).transpose(0, 1) for x in (of_ranks, gates))
        decay, local_beta = gates.unflatten(-1, (-1, 2)).unbind(-1)
        weight = torch.cat([x.chunk(cp)[group.rank()] for x in weight.split(sections)])
        attended = self.delta_rule(mixed, weight, decay, local_beta.to(beta.dtype), bounds, host_bounds)
        return exchange.to_tokens(attended.transpose(0, 1)).transpose(0, 1)


def delta_layer(spec: ModuleSpec) -> ModuleSpec:
    """Return a layer with a delta net in place of its attention, whose linear layers are of the same classes."""
    layer = spec.submodules
    attention = layer.self_attention.submodules
    mixer = GatedDeltaNetSubmodules(
        in_proj=attention.linear_qkv, out_norm=GatedNorm, out_proj=attention.linear_proj
    )  # fmt: skip
    names = layer.sharded_state_dict_keys_map
    return replace(
        spec,
        submodules=replace(
            layer,
            self_attention=ModuleSpec(module=DeltaNet, submodules=mixer),
            sharded_state_dict_keys_map={key: x.replace(".linear_qkv.", ".in_proj.") for key, x in names.items()},
        ),
    )


def sequence_bounds(params: PackedSeqParams | None) -> tuple[Tensor | None, Sequence[int]]:
    """Return where packed sequences begin, with the padding between them, and where the last one ends; and the values
    of that if the host knows them."""
    if params is None:
        return None, ()
    padded: Tensor | None = params.cu_seqlens_q_padded
    bounds: Tensor | None = params.cu_seqlens_q
    if padded is not None:
        return padded, ()
    return bounds, params.bounds if isinstance(params, PackedSamples) else ()
