"""Mapping table and files: the weights of a Hugging Face folder as dist_checkpointing's sharded tensors, and back.

A model built without memory (meta device, tp 1, pp 1) says under which key, at which place and in which shape
megatron-core stores each parameter; the table says what is in it.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from llava_mcore.conversion.mapping import Entry, MappingTable
from llava_mcore.conversion.sharding import Shard
from llava_mcore.errors import ConversionError, problems

SharedState = dict[str, Any]


def parameter_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every parameter of a model built at tp 1, pp 1."""
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def check_shard_rules(table: MappingTable, model: torch.nn.Module) -> None:
    """Compare the table's shard rules with what the model's own layers say.

    Raises:
        ConversionError: lists every parameter that the model cuts along another dim.
    """
    wrong = []
    for name, p in model.named_parameters():
        marks = vars(p)  # megatron-core's layers leave their cut on the parameter; whole ones may carry no mark
        cut = marks.get("tensor_model_parallel", False)
        expected = Shard(marks["partition_dim"], marks["partition_stride"]) if cut else Shard(None)
        if table.entries[name].shard != expected:
            wrong.append(f"{name}: the table says {table.entries[name].shard}, the model {expected}")
    if wrong:
        raise ConversionError(problems("the mapping table cuts tensors otherwise than the model", wrong))


def sharded_weights(
    table: MappingTable,
    model_state: SharedState,
    read: Callable[[str], Tensor],
    *,
    tp_size: int,
    dtype: torch.dtype | None = None,
) -> SharedState:
    """Fill a model's sharded state with the tensors of a Hugging Face folder, cut for `tp_size` ranks.

    Args:
        model_state: `sharded_state_dict()` of a model on the meta device at tp 1, pp 1.
        read: returns one Hugging Face tensor.
        dtype: cast to this, or keep each tensor's own.
    """
    filled: SharedState = {}
    for name, sharded in model_state.items():
        entry = table.entries.get(name)
        if entry is None:
            filled[name] = sharded  # a layer's extra state, which holds nothing here
            continue
        full = entry.to_megatron({x: read(x) for x in entry.hf_names})
        full = full if dtype is None else full.to(dtype)
        filled[name] = [cut for whole in _with_data(sharded, full) for cut in _cut(whole, entry.shard, tp_size)]
    return filled


def _with_data(sharded: ShardedTensor | ShardedTensorFactory, full: Tensor) -> list[ShardedTensor]:
    """Put data under a parameter's key; a factory (SwiGLU) stores its blocks apart."""
    if isinstance(sharded, ShardedTensorFactory):
        return list(replace(sharded, data=full).build())
    return [replace(sharded, data=full, dtype=full.dtype)]


def _cut(whole: ShardedTensor, shard: Shard, tp_size: int) -> list[ShardedTensor]:
    """Store one chunk a tensor-parallel rank, so that each rank later reads only its own."""
    if shard.dim is None or tp_size == 1:
        return [whole]
    assert whole.data is not None and whole.axis_fragmentations is not None
    axis = shard.dim + whole.prepend_axis_num
    layer_offsets = [(a, whole.global_offset[a], whole.global_shape[a]) for a in range(whole.prepend_axis_num)]
    fragments = whole.axis_fragmentations[axis] * tp_size
    first = whole.global_offset[axis] * tp_size // whole.local_shape[shard.dim]
    return [
        ShardedTensor.from_rank_offsets(
            whole.key,
            chunk.contiguous(),
            *layer_offsets,
            (axis, first + rank, fragments),
            replica_id=whole.replica_id,
            prepend_axis_num=whole.prepend_axis_num,
            allow_shape_mismatch=whole.allow_shape_mismatch,
        )
        for rank, chunk in enumerate(whole.data.chunk(tp_size, shard.dim))
    ]


def requests(
    entry: Entry,
    sharded: ShardedTensor | ShardedTensorFactory,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tp_size: int,
) -> list[ShardedTensor]:
    """Return empty sharded tensors that ask for one parameter as `tp_size` ranks hold it."""
    empty = torch.empty(shape, dtype=dtype)
    return [cut for whole in _with_data(sharded, empty) for cut in _cut(whole, entry.shard, tp_size)]


def joined(entry: Entry, loaded: list[Tensor], tp_size: int) -> Tensor:
    """Inverse of the cutting: the pieces that `requests` asked for, back to the full Megatron tensor.

    Pieces come block by block (SwiGLU's gate, then up), and within a block rank by rank.
    """
    if entry.shard.dim is None or tp_size == 1:
        return torch.cat(loaded) if len(loaded) > 1 else loaded[0]
    blocks = [loaded[i : i + tp_size] for i in range(0, len(loaded), tp_size)]
    slices = [torch.cat([block[rank] for block in blocks], entry.shard.dim) for rank in range(tp_size)]
    return entry.shard.join(slices)


def hf_tensors(table: MappingTable, entry: Entry, full: Tensor) -> Mapping[str, Tensor]:
    """Return the Hugging Face tensors of one parameter, copies of tied weights included."""
    tensors = entry.to_hf(full)
    copies = {copy: tensors[original] for copy, original in table.copies.items() if original in tensors}
    return tensors | copies
