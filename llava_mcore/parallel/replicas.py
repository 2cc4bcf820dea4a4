"""Parameters that every tensor-parallel rank has whole: each computes the same update, if the same bits come out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def differing(parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    """Return the names of parameters whose bits are not the same on all ranks of a group; a collective call.

    The device is waited for once.

    Args:
        parameters: by name, in the same order on every rank.
    """
    if group.size() == 1 or not parameters:
        return []
    sums = torch.stack([_checksum(x) for x in parameters.values()])
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[: len(sums)], -extremes[len(sums) :]
    is_different = (largest != smallest).tolist()
    return [name for name, differs in zip(parameters, is_different, strict=True) if differs]


def _checksum(x: Tensor) -> Tensor:
    """Return the sum of a tensor's elements as integers, int64 []."""
    return x.detach().contiguous().view(_OF_SIZE[x.element_size()]).sum(dtype=torch.int64)
