"""Sends a step's micro-batches from the rank of a model replica that read them to its other ranks.

A step's shapes and tokens are sent before the pipeline starts: every rank then knows all shapes, and a broken sample
stops all ranks before any of them has started. The media of a micro-batch, which are much larger, follow when the first
stage begins with it: at most a pipeline's micro-batches are on the device at a time.

b: samples, s: tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.media.batch_fields import Field, Fields, as_used, in_memory
from llava_mcore.parallel.batch import (
    LENGTHS,
    MediaLengths,
    MicroBatch,
    TensorFields,
    host_lengths,
    longest,
    longest_media,
    num_trained,
    pad_to,
)
from llava_mcore.parallel.groups import Groups

_DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32)
"""Dtypes of fields, by their number in the header."""
_ALIGNMENT = 8
"""Alignment of every tensor in a message, in bytes."""
_NUM_OWN = 8
"""Numbers of a row of the header before those of the fields."""


@dataclass(frozen=True)
class _BatchHeader:
    """The header's entry for one micro-batch, from which every rank can split the rest of the message.

    `media`: dtype and shape of each field, as it is in memory (see `in_memory`).
    """

    b: int
    s: int
    num_axes: int
    num_bounds: int
    of_blend: bool
    max_seqlen: int
    num_trained: int
    max_media_seqlen: int
    media: dict[str, tuple[torch.dtype, list[int]]]

    @classmethod
    def of(cls, batch: TensorFields, fields: Fields) -> _BatchHeader:
        b, s = batch.input_ids.shape
        media = {name: in_memory(batch.media[name]) for name in fields}
        return cls(
            b,
            s,
            batch.position_ids.numel() // (b * s),
            batch.cu_seqlens.numel(),
            batch.dataset_ids.numel() > 0,
            longest(batch.cu_seqlens),
            num_trained(batch),
            longest_media(batch.media),
            {name: (x.dtype, list(x.shape)) for name, x in media.items()},
        )

    def counts(self) -> list[int]:
        """Return the row of the header."""
        media = [n for dtype, shape in self.media.values() for n in (_DTYPES.index(dtype), *shape)]
        row = [self.b, self.s, self.num_axes, self.num_bounds, int(self.of_blend)]
        return [*row, self.max_seqlen, self.num_trained, self.max_media_seqlen, *media]

    @classmethod
    def read(cls, row: Sequence[int], fields: Fields) -> _BatchHeader:
        """The inverse of `counts`."""
        b, s, num_axes, num_bounds, of_blend, max_seqlen, num_trained, max_media_seqlen = row[:_NUM_OWN]
        rest = row[_NUM_OWN:]
        media = {}
        for name, field in fields.items():
            dtype, *shape = rest[: _width(field)]
            media[name] = (_DTYPES[dtype], shape)
            rest = rest[_width(field) :]
        return cls(b, s, num_axes, num_bounds, bool(of_blend), max_seqlen, num_trained, max_media_seqlen, media)


def _width(field: Field) -> int:
    """Return how many numbers a field takes in the header: one for its dtype and those of its shape."""
    return 2 + len(field.item_shape)


class SharedStep:
    """The micro-batches of a step on this rank's device, each with its media while it is used.

    On the first stage, going through them sends the media: all ranks of the stage do it alike.
    """

    def __init__(self, batches: Sequence[MicroBatch], media: Callable[[int], dict[str, Tensor]] | None) -> None:
        """batches: without media. media: sends those of a micro-batch; None beyond the first stage."""
        self._batches, self._media = batches, media

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        for i in range(len(self)):
            yield self._with_media(i)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the first micro-batch."""
        return self._batches[0].shape

    def without_media(self) -> Iterator[MicroBatch]:
        """Return the micro-batches for a part of the model that does not begin with the tower."""
        return iter(self._batches)

    def _with_media(self, index: int) -> MicroBatch:
        batch = self._batches[index]
        return batch if self._media is None else replace(batch, media=self._media(index))


def share_step(
    groups: Groups, batches: Sequence[TensorFields] | None, num_micro_batches: int, fields: Fields
) -> SharedStep:
    """Send the step's micro-batches to every rank of this model replica; a collective call.

    Args:
        batches: on the rank that loads data its micro-batches, elsewhere None.
        fields: those of `media`.

    Returns:
        The micro-batches for this rank's device, without media beyond the first stage. With a pipeline all are
        padded to one length, which its fixed-size messages need.
    """
    # Messages between stages have one size.
    if batches is not None and groups.pp_size > 1:
        length = max(x.input_ids.shape[1] for x in batches)
        batches = [pad_to(x, length, fields) for x in batches]
    # A replica of one rank has what it has read.
    if groups.tp_size * groups.pp_size == 1:
        assert batches is not None
        return _on_this_rank(batches, groups.device)
    # First the shapes of all micro-batches, from host to host: receivers must know them.
    header = torch.zeros(num_micro_batches, _NUM_OWN + sum(map(_width, fields.values())), dtype=torch.int64)
    if batches is not None:
        header = torch.tensor([_BatchHeader.of(x, fields).counts() for x in batches], dtype=torch.int64)
    dist.broadcast(header, groups.model_parallel_source, group=groups.control_replica)
    layouts = [_BatchHeader.read(row, fields) for row in header.tolist()]
    # Then lengths and tokens. Media follow when their micro-batch begins, and only on the first stage.
    lengths = _broadcast_lengths(groups, batches, layouts)
    tokens = _broadcast_tokens(groups, batches, layouts)
    media = [_no_media(layout, groups.device) for layout in layouts]
    shared = [_unpack(t, m, n, layout) for t, m, n, layout in zip(tokens, media, lengths, layouts, strict=True)]
    if not groups.is_first_stage:
        return SharedStep(shared, None)
    return SharedStep(
        shared, lambda i: _broadcast_media(groups, None if batches is None else batches[i].media, layouts[i])
    )


def _broadcast_lengths(
    groups: Groups, batches: Sequence[TensorFields] | None, layouts: Sequence[_BatchHeader]
) -> list[MediaLengths]:
    """Send the hosts of the replica the values by which tensor-parallel ranks may divide media."""
    names = [name for name in LENGTHS if name in layouts[0].media]
    sizes = [layout.media[name][1][0] for layout in layouts for name in names]
    if groups.tp_size == 1 or not sum(sizes):
        return [{name: () for name in names} for _ in layouts]
    values = torch.zeros(sum(sizes), dtype=torch.int64)
    if batches is not None:
        values = torch.cat([x.media[name].long() for x in batches for name in names])
    dist.broadcast(values, groups.model_parallel_source, group=groups.control_replica)
    parts = iter(values.split(sizes))
    return [{name: next(parts).tolist() for name in names} for _ in layouts]


def _broadcast_tokens(
    groups: Groups, batches: Sequence[TensorFields] | None, layouts: Sequence[_BatchHeader]
) -> list[list[Tensor]]:
    """Broadcast token planes int64 [2 + axes, b, s], loss masks fp32 [b, s], bounds int32 and dataset ids int32 [b, s]
    of all micro-batches to the whole replica."""
    shapes = []
    for x in layouts:
        planes, mask = (torch.int64, [2 + x.num_axes, x.b, x.s]), (torch.float32, [x.b, x.s])
        shapes.append([planes, mask, (torch.int32, [x.num_bounds]), (torch.int32, [x.b, x.s] if x.of_blend else [0])])
    tensors = None if batches is None else [_token_tensors(x) for x in batches]
    return _broadcast(groups, groups.model_parallel, tensors, shapes)


def _broadcast_media(groups: Groups, media: Mapping[str, Tensor] | None, layout: _BatchHeader) -> dict[str, Tensor]:
    """Broadcast the media of a micro-batch within the first stage."""
    tensors = None if media is None else [[in_memory(media[name]) for name in layout.media]]
    (parts,) = _broadcast(groups, groups.tensor_parallel, tensors, [list(layout.media.values())])
    return {name: as_used(x) for name, x in zip(layout.media, parts, strict=True)}


def _no_media(layout: _BatchHeader, device: torch.device) -> dict[str, Tensor]:
    return {
        name: as_used(torch.empty([0, *shape[1:]], dtype=dtype, device=device))
        for name, (dtype, shape) in layout.media.items()
    }


def _token_tensors(batch: TensorFields) -> list[Tensor]:
    """Return the tensors of `_broadcast_tokens`; all int64 [b, s] are stacked to one."""
    positions = batch.position_ids.view(-1, *batch.input_ids.shape)
    planes = torch.cat([torch.stack([batch.input_ids, batch.labels]), positions])
    return [planes, batch.loss_mask, batch.cu_seqlens, batch.dataset_ids]


def _broadcast(
    groups: Groups,
    group: dist.ProcessGroup,
    tensors: list[list[Tensor]] | None,
    shapes: Sequence[Sequence[tuple[torch.dtype, list[int]]]],
) -> list[list[Tensor]]:
    """Broadcast tensors of known dtypes and shapes from the loading rank as one message of bytes.

    Args:
        tensors: of each micro-batch, on the loading rank.
        shapes: dtype and shape of each of them.
    """
    flat_shapes = [x for part in shapes for x in part]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in flat_shapes]
    starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    message = torch.empty(starts[-1], dtype=torch.uint8, device=groups.device)
    parts = [
        message[start : start + size].view(dtype).view(shape)
        for start, size, (dtype, shape) in zip(starts[:-1], sizes, flat_shapes, strict=True)
    ]
    if tensors is not None:
        for part, x in zip(parts, (x for each in tensors for x in each), strict=True):
            part.copy_(_pinned(x, groups.device), non_blocking=True)
    if message.numel():
        dist.broadcast(message, groups.model_parallel_source, group=group)
    rest = iter(parts)
    return [[next(rest) for _ in part] for part in shapes]


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    """Pin a tensor of the host so that its copy to the device is asynchronous. The loader's are pinned, those
    that are built of them are not."""
    return x.pin_memory() if device.type == "cuda" and not x.is_pinned() else x


def _unpack(
    tokens: list[Tensor], media: dict[str, Tensor], media_lengths: MediaLengths, layout: _BatchHeader
) -> MicroBatch:
    planes, loss_mask, cu_seqlens, dataset_ids = tokens
    input_ids, labels = planes[:2]
    return MicroBatch(
        input_ids,
        labels,
        loss_mask,
        planes[2] if layout.num_axes == 1 else planes[2:],
        media,
        cu_seqlens,
        layout.max_seqlen,
        layout.num_trained,
        layout.max_media_seqlen,
        media_lengths,
        dataset_ids,
    )


def _on_this_rank(batches: Sequence[TensorFields], device: torch.device) -> SharedStep:
    """Copy the micro-batches of a replica of one rank to its device."""

    def moved(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    def media(i: int) -> dict[str, Tensor]:
        return {name: moved(x) for name, x in batches[i].media.items()}

    shared = [
        MicroBatch(
            input_ids=moved(batch.input_ids),
            labels=moved(batch.labels),
            loss_mask=moved(batch.loss_mask),
            position_ids=moved(batch.position_ids),
            media={},
            cu_seqlens=moved(batch.cu_seqlens),
            max_seqlen=longest(batch.cu_seqlens),
            num_trained=num_trained(batch),
            max_media_seqlen=longest_media(batch.media),
            media_lengths=host_lengths(batch.media),
            dataset_ids=moved(batch.dataset_ids),
        )
        for batch in batches
    ]
    return SharedStep(shared, media)
