"""The images, videos and clips of a micro-batch, divided over ranks that each compute a part of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.media.batch_fields import MEDIA_SEQLENS, WINDOW_SEQLENS

LENGTHS = (MEDIA_SEQLENS, WINDOW_SEQLENS)
"""Fields from which the rows of items are counted, so that every rank's host needs their values."""

MediaLengths = Mapping[str, Sequence[int]]
"""These values, by field."""


@dataclass(frozen=True)
class Items:
    """The parts of a micro-batch that belong to each item, in the order of the items.

    `costs`: work of each item, in any unit, which is divided evenly over ranks. `num_features`: rows of the tower's
    output. `rows`: rows of the fields that are divided; the others are whole on every rank. `numbering`: those of them
    whose values count their own rows from 0. `lengths`: what attention sees at once, of towers that read MEDIA_SEQLENS.
    """

    costs: Sequence[int]
    num_features: Sequence[int]
    rows: Mapping[str, Sequence[int]]
    numbering: frozenset[str] = frozenset()
    lengths: Sequence[int] = ()

    def longest(self, chosen: Sequence[int]) -> int:
        """Return the largest length of some items; 0 if the tower does not ask for it."""
        return max((self.lengths[i] for i in chosen if self.lengths), default=0)

    def of(self, media: Mapping[str, Tensor], chosen: Sequence[int]) -> dict[str, Tensor]:
        """Return the fields of some items, of which there is at least one."""
        return dict(media) | {
            name: _chosen(media[name], rows, chosen, renumber=name in self.numbering)
            for name, rows in self.rows.items()
        }


def _chosen(x: Tensor, rows: Sequence[int], chosen: Sequence[int], *, renumber: bool) -> Tensor:
    parts = x.split(list(rows))
    if not renumber:
        return torch.cat([parts[i] for i in chosen])
    before = [0, *accumulate(rows)]
    now = [0, *accumulate(rows[i] for i in chosen)]
    return torch.cat([parts[i] + (start - before[i]) for i, start in zip(chosen, now, strict=False)])


def host_lengths(media: Mapping[str, Tensor]) -> MediaLengths:
    """Return the values of LENGTHS that there are; waits for the device if they are on one."""
    return {name: media[name].tolist() for name in LENGTHS if name in media}


def divide(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the items of each rank in ascending order: from the most expensive one on, each goes to the rank that has
    least (longest-processing-time rule, Graham 1969: at most 4/3 of the best division)."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(item)
        heapq.heappush(loads, (load + costs[item], rank))
    return [sorted(part) for part in parts]


def gather_items(
    local: Tensor,
    num_rows: Sequence[int],
    parts: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    context: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the rows of all items, in their order, from the rows of each rank's items; a collective call.

    The gradient of the result must be the same on every rank (not a share of a sum): each takes its own rows of it.
    Between the ranks of `context` it is a share of a sum, which is added up before each rank takes its own rows.

    Args:
        local: [rows, …] of this rank's items.
        num_rows: of every item.
        parts: the items of each rank of the group.
        context: every n-th rank of the group, n the size of the group divided by theirs; None: there are none.
    """
    gathered: Tensor = _GatherItems.apply(local, num_rows, parts, group, context)
    return gathered


class _GatherItems(torch.autograd.Function):
    """All-gather of unequal parts, padded to the largest, as gloo needs and NCCL is faster with."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        num_rows: Sequence[int],
        parts: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        context: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.num_rows, ctx.parts, ctx.group, ctx.context = num_rows, parts, group, context
        most_rows = max(sum(num_rows[i] for i in part) for part in parts)
        padded = local.new_zeros(most_rows, *local.shape[1:])
        padded[: len(local)] = local
        everyone = local.new_empty(len(parts) * most_rows, *local.shape[1:])
        dist.all_gather_into_tensor(everyone, padded, group=group)
        places: dict[int, int] = {}  # where each item begins in what was gathered
        for rank, part in enumerate(parts):
            starts = accumulate((num_rows[i] for i in part), initial=rank * most_rows)
            places |= dict(zip(part, starts, strict=False))
        return torch.cat([everyone[places[i] : places[i] + count] for i, count in enumerate(num_rows)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        of_items = gradient.split(list(ctx.num_rows))
        stride, rank = len(ctx.parts), ctx.group.rank()
        if ctx.context is not None:
            stride //= ctx.context.size()
        # The rows of the items of each of the ranks that have shares of the sum, one after the other.
        rows = [torch.cat([gradient[:0], *(of_items[i] for i in part)]) for part in ctx.parts[rank % stride :: stride]]
        if ctx.context is None:
            return rows[0], None, None, None, None
        most_rows = max(map(len, rows))
        shares = gradient.new_zeros(len(rows), most_rows, *gradient.shape[1:])
        for share, x in zip(shares, rows, strict=True):
            share[: len(x)] = x
        local = gradient.new_empty(most_rows, *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, shares.flatten(0, 1), group=ctx.context)
        return local[: len(rows[ctx.context.rank()])], None, None, None, None
