"""Causal attention of tokens that context-parallel ranks divide, in torch: keys and values of all ranks are gathered.

It is exact for everything that a single rank can compute, also windows and soft caps. Where Transformer Engine is
installed, its attention is used instead, which overlaps communication with matrix products.

s: tokens of this rank, t: tokens of all, b: samples, n: heads, g: query groups, d: head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.parallel.context import DividedRow, chunks_of_rank

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of [q, b, n, d] to [k, b, g, d], of which the queries are the last q: returns [q, b, n * d]."""


def attend_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Sequence[int],
    bounds_on_device: Tensor | None,
    group: dist.ProcessGroup,
    attend: Attend,
) -> Tensor:
    """Return [s, b, n * d] for this rank's [s, b, n or g, d]; a collective call. The host waits for nothing.

    Args:
        bounds: see `local_tokens`.
        bounds_on_device: the same on the device; None: of a single sequence.
    """
    row = DividedRow.of(len(query), bounds_on_device, query.device, group)
    return attend_gathered(query, gathered_pairs(key, value, row), bounds, group, attend)


def gathered_pairs(key: Tensor, value: Tensor, row: DividedRow) -> Tensor:
    """Return keys and values of all ranks in the order of the row, [t, 2, b, g, d]; one message, a collective call."""
    return row.gather(torch.stack([key, value], dim=1))


def attend_gathered(
    query: Tensor, gathered: Tensor, bounds: Sequence[int], group: dist.ProcessGroup, attend: Attend
) -> Tensor:
    """Return [s, b, n * d] for this rank's queries; arguments as for `attend_chunks`.

    Args:
        gathered: see `gathered_pairs`.
    """
    cp_size = group.size()
    lengths = [end - start for start, end in pairwise(bounds)]
    # Each of this rank's two chunks of a sequence sees the sequence up to the chunk's own end.
    parts, done = [], 0
    for length, of_sequence in zip(lengths, gathered.split(lengths), strict=True):
        size = length // (2 * cp_size)
        for chunk in chunks_of_rank(cp_size, group.rank()) if size else ():
            keys, values = of_sequence[: (chunk + 1) * size].unbind(1)
            parts.append(attend(query[done : done + size], keys, values))
            done += size
    return torch.cat(parts)
