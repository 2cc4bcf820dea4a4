"""One step's micro-batches, read by one rank of each model replica and handed to its other ranks.

A whole step is fetched before the pipeline starts: every rank then knows all shapes, nothing is communicated
between stages in an order of its own, and a broken sample stops all ranks before any of them has begun.

b: samples, s: tokens, i: pictures, n: tokens a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llava_mcore.parallel.groups import Groups


class TensorFields(Protocol):
    """The tensors of a micro-batch."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    pixel_values: Tensor
    image_positions: Tensor


class HostBatch(TensorFields, Protocol):
    """What a data loader yields: CPU tensors of one micro-batch; `num_tokens` leaves padding out."""

    num_tokens: int


@dataclass
class MicroBatch:
    """One micro-batch on the device. Pictures are only there on the first stage.

    input_ids, labels, position_ids: int64 [b, s]; loss_mask: float32 [b, s]; pixel_values: float32
    [i, 3, height, width]; image_positions: int64 [i * n], flat indices into [b * s].
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    pixel_values: Tensor
    image_positions: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        b, s = self.input_ids.shape
        return b, s


_HEADER = 7  # b, s, i, 3, height, width, number of image positions


def share_step(groups: Groups, batches: list[HostBatch] | None, num_micro_batches: int) -> list[MicroBatch]:
    """Hand the step's micro-batches to every rank of this model replica; a collective call.

    Args:
        batches: on the rank that loads data its micro-batches, elsewhere None.

    Returns:
        The micro-batches on this rank's device, without pictures beyond the first stage. With a pipeline all are
        padded to one length, which its fixed-size messages need.
    """
    if batches is not None and groups.pp_size > 1:
        length = max(x.input_ids.shape[1] for x in batches)
        return _share(groups, [pad_to(x, length) for x in batches], num_micro_batches)
    return _share(groups, batches, num_micro_batches)


def _share(groups: Groups, batches: Sequence[TensorFields] | None, num_micro_batches: int) -> list[MicroBatch]:
    header = torch.zeros(num_micro_batches, _HEADER, dtype=torch.int64)
    if batches is not None:
        header = torch.tensor([_describe(x) for x in batches], dtype=torch.int64)
    if groups.tp_size * groups.pp_size == 1:
        assert batches is not None
        return [_to_device(x, groups.device) for x in batches]
    dist.broadcast(header, groups.model_parallel_source, group=groups.control_replica)
    shapes: list[list[int]] = header.tolist()
    everyone, first_stage = groups.model_parallel, groups.tensor_parallel
    token_shapes = [[4, b, s] for b, s, *_ in shapes]
    tokens = _broadcast(groups, everyone, _each(batches, _token_planes), token_shapes, torch.int64)
    if not groups.is_first_stage:
        nothing = torch.empty(0, device=groups.device)
        return [_unpack(t, nothing, nothing.long()) for t in tokens]
    pixel_shapes, place_shapes = [x[2:6] for x in shapes], [x[6:] for x in shapes]
    pixels = _broadcast(groups, first_stage, _each(batches, lambda x: x.pixel_values), pixel_shapes, torch.float32)
    places = _broadcast(groups, first_stage, _each(batches, lambda x: x.image_positions), place_shapes, torch.int64)
    return [_unpack(t, p, q) for t, p, q in zip(tokens, pixels, places, strict=True)]


def pad_to(batch: TensorFields, length: int) -> TensorFields:
    """Pad every sample to `length` tokens; padding is never trained on and comes after all text (causal)."""
    s = batch.input_ids.shape[1]
    if s == length:
        return batch

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, length - s))

    row, column = batch.image_positions // s, batch.image_positions % s
    return MicroBatch(
        input_ids=padded(batch.input_ids),
        labels=padded(batch.labels),
        loss_mask=padded(batch.loss_mask),
        position_ids=padded(batch.position_ids),
        pixel_values=batch.pixel_values,
        image_positions=row * length + column,
    )


def _describe(batch: TensorFields) -> list[int]:
    return [*batch.input_ids.shape, *batch.pixel_values.shape, batch.image_positions.numel()]


def _token_planes(batch: TensorFields) -> Tensor:
    """Stack everything of shape [b, s] into one int64 [4, b, s]: one message instead of four."""
    return torch.stack([batch.input_ids, batch.labels, batch.position_ids, batch.loss_mask.to(torch.int64)])


def _each(batches: Sequence[TensorFields] | None, take: Callable[[TensorFields], Tensor]) -> list[Tensor] | None:
    return None if batches is None else [take(x) for x in batches]


def _broadcast(
    groups: Groups, group: dist.ProcessGroup, tensors: list[Tensor] | None, shapes: list[list[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Broadcast tensors of known shapes from the loading rank as one flat message."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    if tensors is None:
        flat = torch.empty(sum(sizes), dtype=dtype, device=groups.device)
    else:
        flat = torch.cat([x.flatten() for x in tensors]).to(groups.device, dtype)
    if flat.numel():
        dist.broadcast(flat, groups.model_parallel_source, group=group)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _unpack(tokens: Tensor, pixel_values: Tensor, image_positions: Tensor) -> MicroBatch:
    input_ids, labels, position_ids, loss_mask = tokens
    return MicroBatch(input_ids, labels, loss_mask.float(), position_ids, pixel_values, image_positions)


def _to_device(batch: TensorFields, device: torch.device) -> MicroBatch:
    return MicroBatch(
        input_ids=batch.input_ids.to(device),
        labels=batch.labels.to(device),
        loss_mask=batch.loss_mask.to(device),
        position_ids=batch.position_ids.to(device),
        pixel_values=batch.pixel_values.to(device),
        image_positions=batch.image_positions.to(device),
    )
