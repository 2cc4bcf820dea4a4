"""Collective calls that torch does not have.

A fast sum of a few numbers over hosts, an exchange of parts of tensors, each with its own addressee, and a comparison
of replicated parameters bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of the same size, by bytes per element."""


def sum_on_hosts(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over a group of gloo, on the host, in log2(n) rounds; a collective call.

    gloo's own all-reduce passes messages on 2 (n - 1) times.

    In round i each rank exchanges its sum with the rank whose number differs in bit i (recursive doubling). Ranks
    beyond the largest power of two hand their values to a rank below it, and get the result from there.

    Args:
        values: of one dtype and shape on all ranks; integers, whose sums do not depend on the order.
    """
    rank, size = group.rank(), group.size()
    power = 1 << size.bit_length() - 1
    total = values.clone()
    # Ranks beyond the power of two take no part in the rounds.
    if rank >= power:
        _send(total, rank - power, group)
        return _received(total, rank - power, group)
    has_partner = rank + power < size
    if has_partner:
        total += _received(total, rank + power, group)
    # The rounds.
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


@torch.no_grad()
def differing(parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    """Return the names of parameters whose bits are not the same on all ranks of a group; a collective call.

    Ranks that hold a parameter whole compute the same update, if the same bits come out. The device is waited for once.

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
    return x.detach().contiguous().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64)
