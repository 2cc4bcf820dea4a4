"""State that layers keep of the tokens so far, of several sequences at once: keys and values, or a delta net's state.

megatron-core's StaticInferenceContext has one length for all sequences, keeps keys without their rotary positions and
rotates all of them again for every token, and switches masks off, so windows too. Here a layer's core attention is
replaced while tokens are generated. It gets queries and keys that are already rotated, from torch's layers as well as
from Transformer Engine's. Context-parallel ranks divide the tokens of a prompt, but each keeps what follows from all of
them, so that all read the tokens of the answer alike.

r: sequences (rows), s: tokens, n: heads, g: query groups, d: head size.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.compat.delta_rule import torch_step
from llava_mcore.inference.generation.rows import CachedRows, whole_pieces
from llava_mcore.models.attention.context import attend_gathered, gathered_pairs
from llava_mcore.models.attention.sdpa import SDPAttention
from llava_mcore.models.language.cross_attention import CrossAttentionLayer, MaskedAttention
from llava_mcore.models.language.delta_net import DeltaNet, DeltaRule
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import context_parallel_group


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
        divided = self.rows.divided(query)
        if divided is None:
            self._keep(key, value)
            return self._attend(query, key, value)
        pairs = gathered_pairs(key, value, divided)
        self._keep(*pairs.unbind(1))
        return attend_gathered(query, pairs, [0, len(pairs)], divided.group, self._attend)

    def _keep(self, key: Tensor, value: Tensor) -> None:
        """Store keys and values [s, 1, g, d] of the prompt of `rows.row`."""
        for cache, new in zip(self._reserved(len(key), key), (key, value), strict=True):
            cache[:, :, : len(key)].index_copy_(0, self.rows.row, new.permute(1, 2, 0, 3))

    def _next_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_rows, end = self.rows.num_rows, self.rows.num_columns
        keys, values = self._reserved(end, key)
        columns = self.rows.lengths[:, None, None, None].expand(-1, keys.shape[1], 1, keys.shape[3])
        for cache, new in ((keys, key), (values, value)):
            cache.scatter_(2, columns, new[:num_rows, 0, :, None])
        # The heads of a group are treated as tokens, so keys and values need not be repeated.
        q = query[:num_rows, 0].unflatten(1, (keys.shape[1], -1))  # [r, g, n / g, d]
        k, v = keys[:, :, :end], values[:, :, :end]
        if self.softcap is None:
            mask = self.rows.mask(self.window, q.dtype)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        else:
            out = self._capped(q, k, v, self.softcap, self.rows.mask(self.window, torch.bool), 0.0)
        out = out.flatten(1)[:, None]
        padding = len(query) - num_rows
        return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

    def _reserved(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values with room for a number of tokens."""
        if self.keys is None or self.values is None or self.keys.shape[2] < length:
            room = whole_pieces(length)
            self.rows.num_growths += 1
            shape = (self.rows.num_rows, like.shape[2], room, like.shape[3])
            self.keys, self.values = (_grown(x, like.new_zeros(shape)) for x in (self.keys, self.values))
        return self.keys, self.values


class CachedDeltaRule(DeltaRule):
    """Delta rule that keeps the last inputs of its convolution [r, width - 1, c], and a state float32 [r, n, k, v]."""

    divides_heads = False

    def __init__(self, net: DeltaNet, rows: CachedRows) -> None:
        rule = net.delta_rule
        super().__init__(
            net.num_k_heads_local_tp, rule.key_head_dim, rule.value_head_dim, deterministic=rule.deterministic
        )  # fmt: skip
        self.rows = rows
        self.inputs: Tensor | None = None
        self.state: Tensor | None = None

    def forward(
        self,
        mixed: Tensor,
        weight: Tensor,
        decay: Tensor,
        beta: Tensor,
        bounds: Tensor | None,
        host_bounds: Sequence[int] = (),
    ) -> Tensor:
        """Read a prompt of s tokens, or one token of each of s >= r rows; the arguments are those of `DeltaRule`.

        Returns:
            [1, s, n, v]; zeros for a prompt's padding, and for tokens beyond the last row.
        """
        row = self.rows.prefilled
        if row is None:
            out = self._next_tokens(mixed, weight, decay, beta)
        else:
            divided = self.rows.divided(mixed[0])
            if divided is None:
                out = self._prompt(row, mixed, weight, decay, beta)
            else:
                # The whole state is needed, so that each rank reads all tokens: this is the cheapest part of a layer.
                full_mixed, *gates = (divided.gather(x[0])[None] for x in (mixed, decay, beta))
                out = self._prompt(row, full_mixed, weight, *gates)
                out = divided.local_part(_padded(out, full_mixed.shape[1])[0])[None]
        return _padded(out, mixed.shape[1])

    def _prompt(self, row: int, mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return what the tokens of a prompt attend to [1, length, n, v], and keep what follows from them."""
        length = self.rows.prompt_length
        read = mixed[:, :length]
        out, state = self.of_sequence(read, weight, decay[:, :length], beta[:, :length], with_state=True)
        assert state is not None
        inputs, states = self._reserved(read, state, weight.shape[1] - 1)
        last = read[0, -inputs.shape[1] :]
        inputs[row] = F.pad(last, (0, 0, inputs.shape[1] - len(last), 0))
        states[row] = state[0]
        return out

    def _next_tokens(self, mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return [1, r, n, v] of the first r tokens, each of another row."""
        num_rows = self.rows.num_rows
        assert self.inputs is not None and self.state is not None
        window = torch.cat([self.inputs, mixed[0, :num_rows, None]], dim=1)  # [r, width, c]
        self.inputs = window[:, 1:]
        convolved = F.silu((window * weight.T).sum(1, keepdim=True))
        decay, beta = (x[0, :num_rows, None] for x in (decay, beta))
        out, self.state = torch_step()(
            *self.repeated(*self.heads(convolved)),
            g=decay,
            beta=beta,
            initial_state=self.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return torch.as_tensor(out).transpose(0, 1)

    def _reserved(self, read: Tensor, state: Tensor, num_inputs: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and states of all rows, zero at first."""
        if self.inputs is None or self.state is None:
            self.inputs = read.new_zeros(self.rows.num_rows, num_inputs, read.shape[2])
            self.state = state.new_zeros(self.rows.num_rows, *state.shape[1:])
        return self.inputs, self.state


class CachedImages(MaskedAttention):
    """Attention to images that keeps the keys and values that the last token of each row's prompt sees."""

    def __init__(self, rows: CachedRows) -> None:
        super().__init__()
        self.rows = rows
        self.seen_by_row: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None, seen: Tensor) -> Tensor:
        """Attend to a prompt's images, or to those of each row; arguments as for `MaskedAttention`.

        Returns:
            [t, n * d]; zeros for tokens beyond the last row.
        """
        row = self.rows.prefilled
        if row is not None:
            assert key is not None and value is not None
            last = seen[self.rows.prompt_length - 1]
            self.seen_by_row[row] = key[last], value[last]
            return super().forward(query, key, value, seen)
        out = query.new_zeros(len(query), query.shape[1] * query.shape[2])
        for index, (keys, values) in self.seen_by_row.items():
            everything = seen.new_ones(1, len(keys))
            out[index] = super().forward(query[index : index + 1], keys, values, everything)[0]
        return out


def _padded(x: Tensor, length: int) -> Tensor:
    """Return [1, length, n, v] of [1, s, n, v], with zeros at the end."""
    return F.pad(x, (0, 0, 0, 0, 0, length - x.shape[1]))


def _grown(before: Tensor | None, larger: Tensor) -> Tensor:
    """Copy what is in a cache into a larger one."""
    if before is not None:
        larger[:, :, : before.shape[2]] = before
    return larger


@contextlib.contextmanager
def cached_rows(models: Sequence[VisionLanguageModel], num_rows: int, device: torch.device) -> Iterator[CachedRows]:
    """Let the layers of a model's chunks on this rank keep what follows from their tokens, within the context."""
    divides = models[0].config.context_parallel_size > 1
    rows = CachedRows(num_rows, device, context_parallel_group() if divides else None)
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for model in models:
        softcap = model.language_model.shape.attention_softcap
        for layer in model.language_model.decoder.layers:
            mixer: nn.Module = layer.self_attention
            cached: nn.Module
            if isinstance(layer, CrossAttentionLayer):
                mixer = layer.cross_attention
                name, cached = "core_attention", CachedImages(rows)
            elif isinstance(mixer, DeltaNet):
                name, cached = "delta_rule", CachedDeltaRule(mixer, rows)
            else:
                name, cached = "core_attention", CachedAttention(model.config, layer.layer_number, softcap, rows)
            replaced.append((mixer, name, mixer.get_submodule(name)))
            setattr(mixer, name, cached.eval())
    try:
        yield rows
    finally:
        for mixer, name, module in replaced:
            setattr(mixer, name, module)
