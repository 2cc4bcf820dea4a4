"""Sends parts of tensors between all ranks of a group, each to its own addressee."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]], group: dist.ProcessGroup, like: Tensor
) -> list[list[Tensor]]:
    """Send flat tensors to the ranks of a group and return what these sent; a collective call.

    Args:
        outgoing: for each rank the tensors that it gets.
        incoming: for each rank the sizes of those that come from it.
        like: has the dtype and the device of all of them.

    Returns:
        For each rank the tensors that came from it, flat.
    """
    if group.size() == 1:
        return [[x.flatten() for x in outgoing[0]]]
    flat = [x.flatten() for tensors in outgoing for x in tensors]
    sent = torch.cat(flat) if flat else like.new_empty(0)
    to_ranks = [sum(x.numel() for x in tensors) for tensors in outgoing]
    from_ranks = [sum(sizes) for sizes in incoming]
    received = like.new_empty(sum(from_ranks))
    dist.all_to_all_single(received, sent, from_ranks, to_ranks, group=group)
    return [list(part.split(list(sizes))) for part, sizes in zip(received.split(from_ranks), incoming, strict=True)]
