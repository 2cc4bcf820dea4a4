"""A range of a flattened parameter as slices of the tensors that the parameter is saved as."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from llava_mcore.weights.slices import slices_of_range


def flat_slices(
    sharded: ShardedTensor | ShardedTensorFactory,
    start: int,
    stop: int,
    data: torch.Tensor | None,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    replica: int = 0,
) -> list[ShardedTensor]:
    """Return a contiguous range of the flattened parameter as slices of the parameter's saved tensors.

    Args:
        sharded: how the parameter itself is saved.
        data: the elements of the range, None to load them.
        prefix: of the keys of the saved tensors.
        dtype: which they have; None: the parameter's.
        replica: number of this rank among the data-parallel ranks that hold the range.
    """
    slices = []
    # A parameter may be saved as several tensors (a fused one is), which follow each other in the flattened one.
    for offset, tensor in _flat_tensors(sharded):
        shape = tensor.local_shape
        first, last = max(start, offset), min(stop, offset + math.prod(shape))
        done = first
        for tensor_slice in slices_of_range(shape, first - offset, last - offset):
            lead = tensor.prepend_axis_num
            piece = replace(
                tensor,
                key=f"{prefix}{tensor.key}",
                dtype=tensor.dtype if dtype is None else dtype,
                local_shape=(1,) * lead + tensor_slice.size,
                global_offset=_shifted(tensor.global_offset, tensor_slice.start),
                axis_fragmentations=None,
                prepend_axis_num=0,
                replica_id=(*tensor.replica_id[:2], replica),
            )
            if data is not None:  # of its own type, which megatron-core would refuse: a save converts it
                values = data[done - start : done - start + tensor_slice.numel]
                piece.data = values.view((1,) * lead + tensor_slice.size)
            done += tensor_slice.numel
            slices.append(piece)
    return slices


def _shifted(offset: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    lead = len(offset) - len(by)
    return (*offset[:lead], *(a + b for a, b in zip(offset[lead:], by, strict=True)))


def _flat_tensors(sharded: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[int, ShardedTensor]]:
    """Yield the tensors that a parameter is saved as, and where each starts in the flattened parameter.

    Without data. A gated MLP's first matrix, for example, is saved as two tensors.
    """
    if isinstance(sharded, ShardedTensor):
        yield 0, sharded.without_data()
        return
    probe = replace(sharded, data=torch.empty_like(sharded.data, device="meta"))
    for tensor in nested_values(probe.build()):
        assert tensor.data.is_contiguous(), f"{tensor.key}: not one contiguous range of its parameter"
        yield tensor.data.storage_offset(), tensor.without_data()
