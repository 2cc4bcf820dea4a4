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
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from llava_mcore.parallel.groups import Groups
from llava_mcore.pixels import NO_SCALE, normalise


class TensorFields(Protocol):
    """The tensors of a micro-batch."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    pixel_values: Tensor
    pixel_scale: Tensor
    image_positions: Tensor
    cu_seqlens: Tensor


class HostBatch(TensorFields, Protocol):
    """What a data loader yields: CPU tensors of one micro-batch; `num_tokens` leaves padding out."""

    num_tokens: int


@dataclass
class MicroBatch:
    """One micro-batch on the device. Pictures are only there on the first stage.

    input_ids, labels, position_ids: int64 [b, s]; loss_mask: float32 [b, s].
    pixel_values: [i, 3, height, width]; uint8 that pixel_scale [2, 3] normalises, or float32 where that is [0, 3].
    image_positions: int64 [i * n], flat indices into [b * s].
    cu_seqlens: int32 [sequences + 1], where the packed sequences of the only row begin; empty if nothing is packed.
    max_seqlen: tokens of the longest of them.
    num_trained: tokens that loss_mask counts, known without asking the device; None: not known.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    pixel_values: Tensor
    pixel_scale: Tensor
    image_positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int = 0
    num_trained: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        b, s = self.input_ids.shape
        return b, s

    def normalised_pixels(self) -> Tensor:
        """Return float32 [i, 3, height, width], as late as they are needed: they take four times the memory."""
        return normalise(self.pixel_values, self.pixel_scale)

    @property
    def packed_seq_params(self) -> PackedSeqParams | None:
        """What attention and rotary embeddings need to keep packed sequences apart."""
        if not self.cu_seqlens.numel():
            return None
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


# b, s, i, 3, height, width, image positions, rows of pixel_scale, bounds, longest sequence, trained tokens
_HEADER = 11


def share_step(groups: Groups, batches: Sequence[TensorFields] | None, num_micro_batches: int) -> list[MicroBatch]:
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
    everyone = groups.model_parallel
    token_shapes = [[4, b, s] for b, s, *_ in shapes]
    tokens = _broadcast(groups, everyone, _each(batches, _token_planes), token_shapes, torch.int64)
    bound_shapes, numbers = [x[8:9] for x in shapes], [x[9:11] for x in shapes]
    bounds = _broadcast(groups, everyone, _each(batches, lambda x: x.cu_seqlens), bound_shapes, torch.int32)
    pictures = [_no_pictures(groups.device)] * num_micro_batches
    if groups.is_first_stage:
        pictures = _broadcast_pictures(groups, batches, shapes)
    return [_unpack(t, p, b, *n) for t, p, b, n in zip(tokens, pictures, bounds, numbers, strict=True)]


Pictures = tuple[Tensor, Tensor, Tensor]
"""pixel_values, pixel_scale, image_positions."""


def _no_pictures(device: torch.device) -> Pictures:
    return torch.empty(0, device=device), NO_SCALE.to(device), torch.empty(0, dtype=torch.int64, device=device)


def _broadcast_pictures(
    groups: Groups, batches: Sequence[TensorFields] | None, shapes: list[list[int]]
) -> list[Pictures]:
    """Broadcast the pictures within the first stage."""
    group = groups.tensor_parallel
    pixel_type = torch.uint8 if any(x[7] for x in shapes) else torch.float32  # the processor's, so one for all
    # Channels last, as the loader's pixels lie in memory: in any other order the host would sort every byte anew.
    lying = [[i, height, width, channels] for _, _, i, channels, height, width, *_ in shapes]
    rows = _each(batches, lambda x: x.pixel_values.permute(0, 2, 3, 1))
    pixels = [x.permute(0, 3, 1, 2) for x in _broadcast(groups, group, rows, lying, pixel_type)]
    scales = _broadcast(
        groups, group, _each(batches, lambda x: x.pixel_scale), [[x[7], 3] for x in shapes], torch.float32
    )
    places = _broadcast(
        groups, group, _each(batches, lambda x: x.image_positions), [x[6:7] for x in shapes], torch.int64
    )
    return list(zip(pixels, scales, places, strict=True))


def pad_to(batch: TensorFields, length: int) -> TensorFields:
    """Pad every sample to `length` tokens; padding is never trained on and comes after all text (causal)."""
    s = batch.input_ids.shape[1]
    if s == length:
        return batch

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, length - s))

    row, column = batch.image_positions // s, batch.image_positions % s
    bounds = batch.cu_seqlens
    if bounds.numel():  # the padding becomes a sequence of its own
        bounds = torch.cat([bounds, bounds.new_tensor([length])])
    return MicroBatch(
        input_ids=padded(batch.input_ids),
        labels=padded(batch.labels),
        loss_mask=padded(batch.loss_mask),
        position_ids=padded(batch.position_ids),
        pixel_values=batch.pixel_values,
        pixel_scale=batch.pixel_scale,
        image_positions=row * length + column,
        cu_seqlens=bounds,
    )


def fill_rows(batch: TensorFields, rows: int) -> TensorFields:
    """Repeat the first row without loss and pictures until there are so many; a pipeline's messages need one size."""
    missing = rows - len(batch.input_ids)
    if missing <= 0:
        return batch

    def filled(x: Tensor, fill: Tensor) -> Tensor:
        return torch.cat([x, fill.expand(missing, -1)])

    return MicroBatch(
        input_ids=filled(batch.input_ids, batch.input_ids[:1]),
        labels=filled(batch.labels, batch.labels[:1]),
        loss_mask=filled(batch.loss_mask, torch.zeros_like(batch.loss_mask[:1])),
        position_ids=filled(batch.position_ids, batch.position_ids[:1]),
        pixel_values=batch.pixel_values,
        pixel_scale=batch.pixel_scale,
        image_positions=batch.image_positions,
        cu_seqlens=batch.cu_seqlens,
    )


def without_loss(batch: TensorFields) -> TensorFields:
    """Return a micro-batch of the same shape that adds nothing to the loss, without pictures."""
    return MicroBatch(
        input_ids=batch.input_ids,
        labels=batch.labels,
        loss_mask=torch.zeros_like(batch.loss_mask),
        position_ids=batch.position_ids,
        pixel_values=batch.pixel_values[:0],
        pixel_scale=batch.pixel_scale,
        image_positions=batch.image_positions[:0],
        cu_seqlens=batch.cu_seqlens,
    )


def _describe(batch: TensorFields) -> list[int]:
    numbers = [
        batch.image_positions.numel(),
        len(batch.pixel_scale),
        batch.cu_seqlens.numel(),
        _longest(batch.cu_seqlens),
        _num_trained(batch),
    ]
    return [*batch.input_ids.shape, *batch.pixel_values.shape, *numbers]


def _longest(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() else 0


def _num_trained(batch: TensorFields) -> int:
    return int(batch.loss_mask.count_nonzero())


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
    flat = torch.empty(sum(sizes), dtype=dtype, device=groups.device)
    if tensors is not None:
        for part, x in zip(flat.split(sizes), tensors, strict=True):
            part.copy_(x.flatten(), non_blocking=True)  # the loader's tensors are pinned: the host need not wait
    if flat.numel():
        dist.broadcast(flat, groups.model_parallel_source, group=group)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _unpack(tokens: Tensor, pictures: Pictures, cu_seqlens: Tensor, max_seqlen: int, num_trained: int) -> MicroBatch:
    input_ids, labels, position_ids, loss_mask = tokens
    return MicroBatch(
        input_ids, labels, loss_mask.float(), position_ids, *pictures, cu_seqlens, max_seqlen, num_trained
    )


def _to_device(batch: TensorFields, device: torch.device) -> MicroBatch:
    def moved(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    return MicroBatch(
        input_ids=moved(batch.input_ids),
        labels=moved(batch.labels),
        loss_mask=moved(batch.loss_mask),
        position_ids=moved(batch.position_ids),
        pixel_values=moved(batch.pixel_values),
        pixel_scale=moved(batch.pixel_scale),
        image_positions=moved(batch.image_positions),
        cu_seqlens=moved(batch.cu_seqlens),
        max_seqlen=_longest(batch.cu_seqlens),
        num_trained=_num_trained(batch),
    )
