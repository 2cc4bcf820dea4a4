"""How megatron-core 0.19.2 sends tokens to their experts, without waits that are not needed, and over gloo.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from llava_mcore.compat.required import replace_name, required

_SPLITS = ("input_splits", "output_splits", "output_splits_tp")
"""Numbers of tokens that go to and come from each rank."""
_MOVE = "_maybe_dtoh_and_synchronize"
"""The method that copies numbers of tokens to the host, and waits for them where they are needed."""
required(MoEAlltoAllTokenDispatcher, _MOVE)


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all dispatcher, which leaves the number of tokens of each expert on the device.

    The host only waits for what collective calls need. If this rank has all experts it does not wait at all: the
    tokens, which are sorted by expert already, stay where they are.
    """

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if not self.has_all_experts:
            super()._maybe_dtoh_and_synchronize(point)
            for name in _SPLITS:  # on a CPU they are still tensors, which gloo does not take
                value = required(self, name)
                if isinstance(value, Tensor) and not value.is_cuda:
                    setattr(self, name, value.numpy())
        return tokens_per_expert

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens sorted by local expert [t, h], their number for each expert, and their probabilities [t]."""
        if self.has_all_experts:
            return tokens, self.tokens_per_expert, probs
        result: tuple[Tensor, Tensor, Tensor] = super().dispatch_postprocess(tokens, probs)
        return result

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Inverse of `dispatch_postprocess`, of what the experts return [t, h]."""
        if self.has_all_experts:
            return hidden_states
        result: Tensor = super().combine_preprocess(hidden_states)
        return result

    @property
    def has_all_experts(self) -> bool:
        """Whether no other rank has experts of the layer, or parts of them."""
        return self.ep_size == 1 and self.tp_size == 1  # tp: of experts


@functools.cache
def pad_for_gloo() -> None:
    """Let megatron-core gather and scatter different numbers of rows over gloo, which needs equal ones.

    Experts that tensor-parallel ranks divide get other numbers of tokens from each of these ranks.
    """
    gather = required(mappings, "_gather_along_first_dim")
    scatter = required(mappings, "_reduce_scatter_along_first_dim")

    def gather_rows(
        x: Tensor, group: dist.ProcessGroup, output_split_sizes: Sequence[int] | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, *args, **kwargs)
        # Everyone sends as many rows as the longest part has, and drops the padding of the others.
        most_rows = max(output_split_sizes)
        everyone = gather(_padded(x, most_rows), group, None, *args, **kwargs)
        parts = zip(everyone.split(most_rows), output_split_sizes, strict=True) if most_rows else []
        return torch.cat([part[:rows] for part, rows in parts]) if most_rows else x

    def scatter_rows(
        x: Tensor, group: dist.ProcessGroup, input_split_sizes: Sequence[int] | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(x, group, input_split_sizes, *args, **kwargs)
        most_rows = max(input_split_sizes)
        if not most_rows:
            return x
        padded = torch.cat([_padded(part, most_rows) for part in x.split(list(input_split_sizes))])
        return scatter(padded, group, None, *args, **kwargs)[: input_split_sizes[group.rank()]]

    replace_name(mappings, "_gather_along_first_dim", gather_rows)
    replace_name(mappings, "_reduce_scatter_along_first_dim", scatter_rows)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Return x with zero rows at its end."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
