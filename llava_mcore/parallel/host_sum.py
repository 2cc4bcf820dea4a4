"""A sum of a few numbers over n hosts in log2(n) rounds of messages; gloo's own passes them on 2 (n - 1) times."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sum_on_hosts(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over a group of gloo, on the host; a collective call.

    In round i each rank exchanges its sum with the rank whose number differs in bit i (recursive doubling). Ranks
    beyond the largest power of two hand their values to a rank below it, and get the result from there.

    Args:
        values: of one dtype and shape on all ranks; integers, whose sums do not depend on the order.
    """
    rank, size = group.rank(), group.size()
    power = 1 << size.bit_length() - 1
    total = values.clone()
    if rank >= power:
        _send(total, rank - power, group)
        return _received(total, rank - power, group)
    has_partner = rank + power < size
    if has_partner:
        total += _received(total, rank + power, group)
    bit = 1
    while bit < power:
        sent = dist.isend(total, group_dst=rank ^ bit, group=group)
        other = _received(total, rank ^ bit, group)
        assert sent is not None
        sent.wait()
        total = total + other  # a new tensor: the old one has been sent
        bit *= 2
    if has_partner:
        _send(total, rank + power, group)
    return total


def _send(values: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    dist.send(values, group_dst=rank, group=group)


def _received(like: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(like)
    dist.recv(received, group_src=rank, group=group)
    return received
