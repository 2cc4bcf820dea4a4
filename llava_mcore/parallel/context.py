"""Context parallelism: which tokens of a micro-batch each rank has, and how they are exchanged.

    sequence of 8c tokens, cp 2:   chunks  0 1 2 3      rank 0 has 0 and 3, rank 1 has 1 and 2

Every sequence, packed or a row, is cut into 2 * cp chunks of equal size. Rank r has chunks r and 2 * cp - 1 - r of each
one: in causal attention all ranks then have the same work. Megatron-LM and Transformer Engine cut sequences alike.

b: samples, s: tokens of a row, t: tokens of a row on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.media.batch_fields import Fields
from llava_mcore.parallel.batch import MicroBatch, TensorFields


def chunks_of_rank(cp_size: int, rank: int) -> tuple[int, int]:
    """Return the numbers of the two chunks that a rank has of every sequence."""
    return rank, 2 * cp_size - 1 - rank


def across_nodes(tp_size: int, cp_size: int, world_size: int, per_node: int) -> str | None:
    """Return a line if ranks that divide samples are on different nodes; None otherwise. These ranks are neighbors,
    tensor-parallel ones first."""
    divisors = [n for n in range(1, cp_size + 1) if per_node % (tp_size * n) == 0]
    if cp_size == 1 or world_size <= per_node or cp_size in divisors:
        return None
    advice = f"--cp {divisors[-1]} stays inside a node" if divisors else f"--tp {tp_size} alone does not fit into nodes"
    neighbors = [n for n in divisors if n > 1 and cp_size % n == 0]
    if neighbors:
        advice += f"; with --cp-comm-type a2a+p2p --cp-a2a-size {neighbors[-1]}, those of fewer heads do"
    return (
        f"--tp {tp_size} x --cp {cp_size} = {tp_size * cp_size} processes divide the tokens of a sample, on several "
        f"nodes of {per_node}: keys and values of every layer cross the network; {advice}"
    )


def uncuttable(batch: TensorFields, cp_size: int) -> str | None:
    """Return why a pack cannot be cut into 2 * cp chunks; None if it can. Rows are padded first, so they can."""
    multiple = 2 * cp_size
    lengths = [end - start for start, end in pairwise(batch.cu_seqlens.tolist())] if cp_size > 1 else []
    uneven = [f"{index} ({length} tokens)" for index, length in enumerate(lengths) if length % multiple]
    if not uneven:
        return None
    return (
        f"--cp {cp_size}: the lengths of packed samples must be multiples of {multiple} = 2 x --cp, but these are not: "
        f"{', '.join(uneven[:5])}: set data.sample_multiple to a multiple of {multiple}"
    )


def cut(batch: TensorFields, cp_size: int, fields: Fields) -> list[TensorFields]:
    """Return the part of a micro-batch of every rank, on the host.

    `cu_seqlens` stay those of whole sequences, as Transformer Engine expects. All ranks have all media. The index of a
    token on another rank becomes b * s, one after this rank's last token: what is written there is dropped.
    """
    if cp_size == 1:
        return [batch]
    b, t = batch.input_ids.shape
    bounds = batch.cu_seqlens.tolist() or [0, t]
    parts: list[TensorFields] = []
    for rank in range(cp_size):
        columns = local_tokens(bounds, cp_size, rank)
        places = torch.full((b, t), b * len(columns))
        places[:, columns] = torch.arange(b * len(columns)).view(b, -1)
        media = {
            name: places.view(-1)[x] if fields[name].index_of == "tokens" else x for name, x in batch.media.items()
        }
        part = MicroBatch(
            input_ids=batch.input_ids[:, columns],
            labels=batch.labels[:, columns],
            loss_mask=batch.loss_mask[:, columns],
            position_ids=batch.position_ids[..., columns],
            media=media,
            cu_seqlens=batch.cu_seqlens,
            dataset_ids=batch.dataset_ids[:, columns] if batch.dataset_ids.numel() else batch.dataset_ids,
        )
        parts.append(part)
    return parts


def local_tokens(bounds: Sequence[int], cp_size: int, rank: int) -> Tensor:
    """Return the indices of a rank's tokens of a row, int64 [s].

    Args:
        bounds: the starts of all sequences, whose lengths are multiples of 2 * cp, and the end of the last one.
    """
    first, last = chunks_of_rank(cp_size, rank)
    parts = []
    for start, end in pairwise(bounds):
        size = (end - start) // (2 * cp_size)
        parts += [torch.arange(start + i * size, start + (i + 1) * size) for i in (first, last)]
    return torch.cat(parts)


def place_of(token: int, num_tokens: int, cp_size: int) -> tuple[int, int]:
    """Return the rank that has a token of a row of one sequence, and the token's index among the rank's."""
    size = num_tokens // (2 * cp_size)
    chunk, index = divmod(token, size)
    return (chunk, index) if chunk < cp_size else (2 * cp_size - 1 - chunk, size + index)


def gathered_rows(bounds: Tensor, num_tokens: int, cp_size: int) -> Tensor:
    """Return where each token of a row is after the ranks' tokens were gathered one after the other, int64 [t].

    Nothing waits for the device.

    Args:
        bounds: see `local_tokens`, [sequences + 1], on any device.
        num_tokens: t, the last of them.
    """
    tokens = torch.arange(num_tokens, device=bounds.device)
    starts = bounds.long()
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    start = starts[sequence]
    size = (starts[sequence + 1] - start) // (2 * cp_size)
    chunk = (tokens - start) // size
    is_second = chunk >= cp_size
    rank = torch.where(is_second, 2 * cp_size - 1 - chunk, chunk)
    local = start // cp_size + is_second * size + (tokens - start) % size
    return rank * (num_tokens // cp_size) + local


@dataclass(frozen=True)
class DividedRow:
    """A row whose tokens the ranks of a group divide.

    `rows`: see `gathered_rows`.
    """

    rows: Tensor
    group: dist.ProcessGroup

    @classmethod
    def of(cls, num_local: int, bounds: Tensor | None, device: torch.device, group: dist.ProcessGroup) -> DividedRow:
        """Return the row of which this rank has `num_local` tokens; bounds: None for a single sequence."""
        length = num_local * group.size()
        ends = torch.arange(2, device=device) * length if bounds is None else bounds
        return cls(gathered_rows(ends, length, group.size()), group)

    def gather(self, x: Tensor) -> Tensor:
        """Return [t, ...] in the order of the row, of this rank's [s, ...]; collective, see `gather_tokens`."""
        return gather_tokens(x, self.group)[self.rows]

    def local_part(self, x: Tensor) -> Tensor:
        """Return this rank's [s, ...] of [t, ...] in the order of the row."""
        of_ranks = torch.empty_like(x, memory_format=torch.contiguous_format)
        of_ranks[self.rows] = x
        return of_ranks.chunk(self.group.size())[self.group.rank()]


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [cp * s, ...] of the [s, ...] of every rank; collective. Backward, each rank gets the sum of what all
    ranks' results contribute to its part."""
    gathered: Tensor = _GatherTokens.apply(x, group)
    return gathered


class _GatherTokens(torch.autograd.Function):
    """All-gather, whose gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        local = gradient.new_empty(len(gradient) // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


def exchange_blocks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [cp, ...] where block i is the block that rank i has for this rank in its [cp, ...]; collective."""
    exchanged: Tensor = _ExchangeBlocks.apply(x, group)
    return exchanged


class _ExchangeBlocks(torch.autograd.Function):
    """All-to-all, which is its own inverse and gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        exchanged = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(exchanged, x.contiguous(), group=group)
        return exchanged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return exchange_blocks(gradient, ctx.group), None


@dataclass(frozen=True)
class HeadExchange:
    """Exchanges tokens for heads: every rank then has all tokens of a part of the heads, in their order, and back."""

    rows: Tensor
    """See `gathered_rows`."""
    group: dist.ProcessGroup

    def to_heads(self, x: Tensor) -> Tensor:
        """Return [t, b, heads / cp, d] of [s, b, heads, d]; collective."""
        cp = self.group.size()
        blocks = exchange_blocks(x.unflatten(2, (cp, -1)).movedim(2, 0), self.group)
        return blocks.flatten(0, 1)[self.rows]

    def to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `to_heads`."""
        cp = self.group.size()
        blocks = x[self.rows.argsort()].unflatten(0, (cp, -1))
        return exchange_blocks(blocks, self.group).movedim(0, 2).flatten(2, 3)
