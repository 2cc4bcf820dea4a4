"""Sends a step's micro-batches from the rank of a model replica that read them to its other ranks.

A step's shapes and tokens are sent before the pipeline starts: every rank then knows all shapes, and a broken sample
stops all ranks before any of them has started. The media of a micro-batch, which are much larger, follow when the first
stage begins with it: at most a pipeline's micro-batches are on the device at a time.

With context parallelism the rank that read a micro-batch cuts it on its host, into the tokens of each rank. All ranks
of the replica receive all parts, in one message, and keep their own.

b: samples, s: tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.media.batch_fields import Fields, as_used, in_memory
from llava_mcore.parallel.batch import MicroBatch, TensorFields, longest, longest_media, num_trained, pad_to
from llava_mcore.parallel.batch_header import BatchHeader, header_width
from llava_mcore.parallel.context import cut
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.items import LENGTHS, MediaLengths, host_lengths

_Shapes = Sequence[Sequence[tuple[torch.dtype, list[int]]]]
"""Dtype and shape of each tensor of each part of a message."""

_ALIGNMENT = 8
"""Alignment of every tensor in a message, in bytes."""


class SharedStep:
    """The micro-batches of a step on this rank's device, each with its media while it is used.

    On the first stage, iterating sends the media, so all ranks of the stage must iterate together.
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
    groups: Groups,
    batches: Sequence[TensorFields] | None,
    num_micro_batches: int,
    fields: Fields,
) -> SharedStep:
    """Send the step's micro-batches to every rank of this model replica; a collective call.

    Args:
        batches: on the rank that loads data its micro-batches, elsewhere None.
        fields: those of `media`.

    Returns:
        The micro-batches for this rank's device, without media beyond the first stage; with context parallelism this
        rank's tokens of them. With a pipeline all are padded to one length, which its fixed-size messages need.
    """
    parts = None if batches is None else _parts(groups, batches, fields, groups.cp_size)
    # A replica of one rank has what it has read.
    if groups.replica_size == 1:
        assert parts is not None
        return _on_this_rank([part for (part,) in parts], groups.device)
    # First the shapes of all parts of all micro-batches, from host to host: receivers must know them.
    num_parts = groups.cp_size
    header = torch.zeros(num_micro_batches, num_parts, header_width(fields), dtype=torch.int64)
    if parts is not None:
        header = torch.tensor([[BatchHeader.of(x, fields).counts() for x in of_batch] for of_batch in parts])
    dist.broadcast(header, groups.replica_source, group=groups.control_replica)
    all_layouts = [[BatchHeader.read(row, fields) for row in rows] for rows in header.tolist()]
    layouts = [of_batch[groups.cp_rank] for of_batch in all_layouts]
    # Then lengths and tokens. Media follow when their micro-batch begins, and only on the first stage.
    lengths, bounds = _broadcast_lengths(groups, parts, layouts)
    tokens = _broadcast_tokens(groups, parts, all_layouts)
    media = [_no_media(layout, groups.device) for layout in layouts]
    shared = [_unpack(*of_batch) for of_batch in zip(tokens, media, lengths, bounds, layouts, strict=True)]
    if not groups.is_first_stage:
        return SharedStep(shared, None)
    return SharedStep(
        shared, lambda i: _broadcast_media(groups, None if parts is None else parts[i], layouts[i], num_parts, fields)
    )


def _parts(groups: Groups, batches: Sequence[TensorFields], fields: Fields, num_parts: int) -> list[list[TensorFields]]:
    """Return the part of each micro-batch of every context-parallel rank."""
    lengths = [batch.input_ids.shape[1] for batch in batches]
    if groups.pp_size > 1:  # messages between stages have one size
        lengths = [max(lengths)] * len(lengths)
    if num_parts > 1:  # rows are cut into chunks of equal size
        multiple = 2 * num_parts
        lengths = [-(-length // multiple) * multiple for length in lengths]
    padded = [pad_to(x, length, fields) for x, length in zip(batches, lengths, strict=True)]
    return [cut(x, num_parts, fields) for x in padded]


def _broadcast_lengths(
    groups: Groups, parts: Sequence[Sequence[TensorFields]] | None, layouts: Sequence[BatchHeader]
) -> tuple[list[MediaLengths], list[list[int]]]:
    """Send the hosts of the replica the values by which the ranks of a stage may divide media, and the bounds of packed
    sequences."""
    divides = groups.tp_size * groups.cp_size > 1
    names = [name for name in LENGTHS if name in layouts[0].media]
    of_media = [[layout.media[name][1][0] if divides else 0 for name in names] for layout in layouts]
    sizes = [n for layout, row in zip(layouts, of_media, strict=True) for n in (layout.num_bounds, *row)]
    values = torch.zeros(sum(sizes), dtype=torch.int64)
    if parts is not None and len(values):
        chosen = [[part.cu_seqlens, *(part.media[name] for name in names if divides)] for part, *_ in parts]
        values = torch.cat([x.long() for row in chosen for x in row])
    if len(values):
        dist.broadcast(values, groups.replica_source, group=groups.control_replica)
    received = (x.tolist() for x in values.split(sizes))
    bounds: list[list[int]] = []
    lengths: list[MediaLengths] = []
    for _ in layouts:
        bounds.append(next(received))
        lengths.append({name: next(received) for name in names})
    return lengths, bounds


def _broadcast_tokens(
    groups: Groups, parts: Sequence[Sequence[TensorFields]] | None, layouts: Sequence[Sequence[BatchHeader]]
) -> list[list[Tensor]]:
    """Broadcast token planes int64 [2 + axes, b, s], loss masks fp32 [b, s], bounds int32 and dataset ids int32 [b, s]
    of all parts of all micro-batches to the whole replica; return those of this rank's parts."""
    shapes = []
    for x in (layout for of_batch in layouts for layout in of_batch):
        planes, mask = (torch.int64, [2 + x.num_axes, x.b, x.s]), (torch.float32, [x.b, x.s])
        shapes.append([planes, mask, (torch.int32, [x.num_bounds]), (torch.int32, [x.b, x.s] if x.of_blend else [0])])
    tensors = None if parts is None else [_token_tensors(part) for of_batch in parts for part in of_batch]
    num_parts = len(layouts[0])
    return _broadcast(groups, groups.replica, tensors, shapes)[groups.cp_rank :: num_parts]


def _broadcast_media(
    groups: Groups, parts: Sequence[TensorFields] | None, layout: BatchHeader, num_parts: int, fields: Fields
) -> dict[str, Tensor]:
    """Broadcast the media of a micro-batch within the first stage: first the fields that all ranks need, then the token
    indices of each context-parallel rank."""
    divided = [name for name in layout.media if fields[name].index_of == "tokens" and num_parts > 1]
    common = [name for name in layout.media if name not in divided]
    names = [common, *[divided] * (num_parts if divided else 0)]
    tensors = None
    if parts is not None:
        sources = [parts[0], *parts] if divided else [parts[0]]
        tensors = [[in_memory(x.media[name]) for name in each] for x, each in zip(sources, names, strict=True)]
    received = _broadcast(groups, groups.stage, tensors, [[layout.media[name] for name in each] for each in names])
    local = dict(zip(common, received[0], strict=True))
    if divided:
        local |= dict(zip(divided, received[1 + groups.cp_rank], strict=True))
    return {name: as_used(local[name]) for name in layout.media}


def _no_media(layout: BatchHeader, device: torch.device) -> dict[str, Tensor]:
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
    shapes: _Shapes,
) -> list[list[Tensor]]:
    """Broadcast tensors of known dtypes and shapes from the loading rank as one message of bytes.

    Args:
        tensors: of each part, on the loading rank.
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
        dist.broadcast(message, groups.replica_source, group=group)
    rest = iter(parts)
    return [[next(rest) for _ in part] for part in shapes]


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    """Pin a tensor of the host so that its copy to the device is asynchronous. The loader's are pinned, those
    that are built of them are not."""
    return x.pin_memory() if device.type == "cuda" and not x.is_pinned() else x


def _unpack(
    tokens: list[Tensor],
    media: dict[str, Tensor],
    media_lengths: MediaLengths,
    bounds: Sequence[int],
    layout: BatchHeader,
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
        bounds,
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
            bounds=batch.cu_seqlens.tolist(),
        )
        for batch in batches
    ]
    return SharedStep(shared, media)
