"""The gradient buffers of megatron-core 0.19.2's data-parallel wrapper, and the order in which it reduces them, which
have no public interface.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Parameter

from llava_mcore.compat.required import replace_name, required
from llava_mcore.compat.torch import multiply


def gradient_ranges(wrapped: DistributedDataParallel, parameters: Container[Parameter]) -> Iterator[Tensor]:
    """Yield what this rank has of the reduced gradients of some trained parameters, as few flat views, with the padding
    between them.

    Each view is of parameters that no other one is between in a buffer. With the distributed optimizer a rank has only
    its shard of each bucket; the rest of the buffer holds nothing that is used.
    """
    for buffer in required(wrapped, "buffers"):
        places = required(buffer, "param_index_map")  # start, end and bucket of each parameter
        spans = sorted((start, end, param in parameters) for param, (start, end, _) in places.items())
        reduced = _reduced_here(buffer)
        for is_wanted, group in groupby(spans, key=lambda span: span[2]):
            if is_wanted:
                together = list(group)
                for start, end in reduced:
                    first, last = max(start, together[0][0]), min(end, together[-1][1])
                    if first < last:
                        yield required(buffer, "grad_data")[first:last]


def _reduced_here(buffer: Any) -> list[tuple[int, int]]:
    """Return the parts of a gradient buffer in which this rank has sums over the data-parallel ranks."""
    if not required(buffer, "ddp_config").use_distributed_optimizer:
        return [(0, required(buffer, "grad_data").numel())]
    group = required(buffer, "data_parallel_group")
    shards = []
    for bucket in required(buffer, "buckets"):
        length = required(bucket, "grad_data").numel() // group.size()
        start = required(bucket, "offset") + group.rank() * length
        shards.append((start, start + length))
    return shards


def scale_at_full_bandwidth(wrapped: DistributedDataParallel) -> None:
    """Divide gradients by the number of tokens with a kernel that reads several values at a time.

    megatron-core multiplies its buffers by a tensor of one value. That takes torch's kernel for broadcasts, which
    reached 38 % of an H200's bandwidth. The result has the same bits.
    """
    for buffer in [*required(wrapped, "buffers"), *required(wrapped, "expert_parallel_buffers")]:
        replace_name(buffer, "scale_gradients", partial(_scale, buffer))


def _scale(buffer: Any, factor: Tensor | float) -> None:
    parts = [*required(buffer, "grad_data").split(_PART), *required(buffer, "extra_main_grads")]
    multiply(parts, factor)


_PART = 2**30
"""Elements that a kernel scales at most, so that it counts them in 32 bits."""


def reduce_in_fixed_order(wrapped: DistributedDataParallel) -> None:
    """Reduce the buckets of gradients in the same order on all data-parallel ranks, from the last layer to the first.

    megatron-core starts to reduce a bucket as soon as autograd has its gradients. That order depends on the autograd
    graph: a CUDA graph of several layers returns all of their gradients at once. Ranks of which one has captured a
    shape and another has not would add up gradients of different layers.
    """
    places = {param: place for place, param in enumerate(wrapped.module.parameters())}
    groups = [*required(wrapped, "bucket_groups"), *required(wrapped, "expert_parallel_bucket_groups")]
    for group in groups:
        for name in ("is_first_batch", "start_grad_sync", "register_grad_ready"):
            required(group, name)
    # A bucket is complete with the gradient of its first parameter in forward order.
    order = _Order(sorted(groups, key=lambda group: -min(places[param] for param in group.params)))
    for group in groups:
        replace_name(group, "start_grad_sync", order.starter(group))


class _Order:
    """The buckets of a model chunk in the order in which they are reduced, and how far the current step has come."""

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups
        self._begin = {id(group): group.start_grad_sync for group in groups}
        self._ready: set[int] = set()
        self._next = 0

    def starter(self, group: Any) -> Callable[..., None]:
        """Return what replaces the method by which a bucket starts to be reduced."""

        def start_grad_sync(force_all_reduce: bool | None = False) -> None:
            # megatron-core starts all buckets of the first step after the backward pass, in the order of its list.
            if group.is_first_batch:
                self._begin[id(group)](force_all_reduce=force_all_reduce)
                return
            self._ready.add(id(group))
            while self._next < len(self._groups) and id(self._groups[self._next]) in self._ready:
                self._begin[id(self._groups[self._next])](force_all_reduce=force_all_reduce)
                self._next += 1
            if self._next == len(self._groups):
                self._ready.clear()
                self._next = 0

        return start_grad_sync
