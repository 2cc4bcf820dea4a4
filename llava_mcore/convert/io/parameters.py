"""The model without memory, and keys, positions and pieces of its parameters in a checkpoint.

They come from the mapping table and from megatron-core's own description of the model, which is built at tp 1, pp 1.
All tensors here are on the meta device; no data is read.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.weights.slices import Shape, TensorSlice
from llava_mcore.weights.table import Entry, MappingTable, Shard

SharedState = dict[str, Any]


def meta_model(hf: PretrainedConfig, *, num_vocab_rows: int) -> VisionLanguageModel:
    """Build the whole model (tp 1, pp 1) on the meta device. Process groups of one process must exist.

    Args:
        num_vocab_rows: rows of the embedding, including padding.
    """
    options = ModelOptions(initialize=False, on_cpu=True, make_vocab_size_divisible_by=num_vocab_rows)
    with torch.device("meta"):
        return VisionLanguageModel(hf, options)


def parameter_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every parameter of a model built at tp 1, pp 1."""
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def check_shard_rules(table: MappingTable, model: torch.nn.Module) -> None:
    """Compare the table's shard rules with those of the model's layers.

    Raises:
        ConversionError: lists every parameter that the model splits along another dim.
    """
    wrong = []
    for name, p in model.named_parameters():
        marks = vars(p)  # megatron-core's layers mark parameters with their split; unsplit ones may lack the mark
        cut = marks.get("tensor_model_parallel", False)
        expected = Shard(None)
        if cut:
            expected = Shard(
                marks["partition_dim"],
                marks.get("partition_stride", 1),
                marks.get("partition_sections", ()),
                marks.get("of_experts", False),
            )
        if table.entries[name].shard != expected:
            wrong.append(f"{name}: the table says {table.entries[name].shard}, the model {expected}")
    if wrong:
        raise ConversionError(problems("the mapping table splits tensors differently from the model", wrong))


@dataclass(frozen=True)
class StoredSlice:
    """Rows of a parameter, from `first` on, are `tensor_slice` of the tensor stored under `key`, which may have leading
    dims for layers. Most parameters are one slice; a delta net's first matrix has a key for each of its parts."""

    key: str
    tensor_slice: TensorSlice
    first: int = 0


def stored_slices(model_state: SharedState, shapes: Mapping[str, Shape]) -> dict[str, tuple[StoredSlice, ...]]:
    """Return where megatron-core stores each parameter of the given shapes."""
    return {name: _stored_slices(_with_data(model_state[name], _meta(shape))) for name, shape in shapes.items()}


@dataclass(frozen=True)
class TensorChunk:
    """One chunk of the stored tensor `key`: at `offset`, of `shape`; `tensor_slice`: of the parameter."""

    key: str
    offset: Shape
    shape: Shape
    tensor_slice: TensorSlice


@dataclass(frozen=True)
class EntryWrite:
    """One parameter: its Hugging Face tensors, its dtype and full shape, and the pieces to store."""

    entry: Entry
    sources: tuple[TensorAt, ...]
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[TensorChunk, ...]

    @property
    def num_bytes(self) -> int:
        return TensorSlice.full(self.shape).numel * self.dtype.itemsize

    @property
    def located(self) -> dict[str, TensorAt]:
        """Each Hugging Face tensor and where it is."""
        return dict(zip(self.entry.hf_names, self.sources, strict=True))

    @property
    def is_cast(self) -> bool:
        return any(at.dtype != self.dtype for at in self.sources)


def planned_weights(
    table: MappingTable,
    model_state: SharedState,
    sources: Mapping[str, TensorAt],
    *,
    tp_size: int,
    ep_size: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[SharedState, list[EntryWrite]]:
    """Return the sharded state of a Hugging Face folder, split for `tp_size` ranks and its experts for `ep_size`, and
    the content of each of its pieces.

    Args:
        model_state: `sharded_state_dict()` of a model on the meta device at tp 1, pp 1.
        sources: where each Hugging Face tensor is.
        dtype: cast to this, or keep each tensor's own.

    The state has no data; megatron-core creates a checkpoint's metadata from it.
    """
    # Layers may have extra state, which the table does not know.
    state: SharedState = {}
    writes: list[EntryWrite] = []
    for name, sharded in model_state.items():
        entry = table.entries.get(name)
        if entry is None:
            state[name] = sharded  # a layer's extra state, which is empty here
            continue
        # The whole parameter, without data: its dtype and shape follow from the sources.
        tensors = tuple(sources[x] for x in entry.hf_names)
        target_dtype = tensors[0].dtype if dtype is None else dtype
        meta = {x: _meta(at.shape, target_dtype) for x, at in zip(entry.hf_names, tensors, strict=True)}
        full = entry.to_megatron(meta)
        # megatron-core's key and place, cut for the ranks; and the parts of the parameter that the pieces are.
        blocks = _with_data(sharded, full)
        stored = {x.key: x for x in _stored_slices(blocks)}
        state[name] = [cut for block in blocks for cut in _cut(block, entry.shard, tp_size, ep_size)]
        pieces = tuple(_piece(cut, stored[cut.key]) for cut in state[name])
        writes.append(EntryWrite(entry, tensors, target_dtype, tuple(full.shape), pieces))
    return state, writes


def _meta(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _stored_slices(pieces: list[ShardedTensor]) -> tuple[StoredSlice, ...]:
    """Return the slices that enclose the blocks of a whole parameter, one for each key, in the order of its rows."""
    slices: list[StoredSlice] = []
    first = 0
    for key in dict.fromkeys(x.key for x in pieces):
        parts = [_place(x) for x in pieces if x.key == key]
        start = tuple(map(min, zip(*(x.start for x in parts), strict=True)))
        ends = ((a + n for a, n in zip(x.start, x.size, strict=True)) for x in parts)
        size = tuple(end - begin for end, begin in zip(map(max, zip(*ends, strict=True)), start, strict=True))
        slices.append(StoredSlice(key, TensorSlice(start, size), first))
        layers = pieces[0].prepend_axis_num
        first += size[layers] if len(size) > layers else 0
    return tuple(slices)


def _place(piece: ShardedTensor) -> TensorSlice:
    return TensorSlice(tuple(piece.global_offset), (1,) * piece.prepend_axis_num + tuple(piece.local_shape))


def _piece(cut: ShardedTensor, within: StoredSlice) -> TensorChunk:
    layers, stored = cut.prepend_axis_num, _place(cut)
    seen = stored.seen_from(within.tensor_slice.start)
    start, size = seen.start[layers:], seen.size[layers:]
    if within.first:
        start = (within.first + start[0], *start[1:])
    return TensorChunk(cut.key, stored.start, stored.size, TensorSlice(start, size))


def _with_data(sharded: ShardedTensor | ShardedTensorFactory, full: Tensor) -> list[ShardedTensor]:
    """Put data under a parameter's key; a factory (SwiGLU) stores its blocks separately."""
    if isinstance(sharded, ShardedTensorFactory):
        return list(replace(sharded, data=full).build())
    return [replace(sharded, data=full, dtype=full.dtype)]


def _cut(full: ShardedTensor, shard: Shard, tp_size: int, ep_size: int) -> list[ShardedTensor]:
    """Store one chunk per tensor-parallel rank, of experts per expert-parallel rank, so that each rank later reads only
    its own.

    What does not divide stays whole: towers that ranks do not divide.
    """
    dim, size = (0, ep_size) if shard.experts else (shard.dim, tp_size)
    if dim is None or size == 1 or full.local_shape[dim] % size:
        return [full]
    assert full.data is not None and full.axis_fragmentations is not None
    axis = dim + full.prepend_axis_num
    layer_offsets = [(a, full.global_offset[a], full.global_shape[a]) for a in range(full.prepend_axis_num)]
    fragments = full.axis_fragmentations[axis] * size
    first = full.global_offset[axis] * size // full.local_shape[dim]
    return [
        ShardedTensor.from_rank_offsets(
            full.key,
            chunk.contiguous(),
            *layer_offsets,
            (axis, first + rank, fragments),
            replica_id=full.replica_id,
            prepend_axis_num=full.prepend_axis_num,
            allow_shape_mismatch=full.allow_shape_mismatch,
        )
        for rank, chunk in enumerate(full.data.chunk(size, dim))
    ]
