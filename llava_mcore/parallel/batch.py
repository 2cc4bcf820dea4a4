"""A micro-batch: on the host, as a loader yields it, and on the device, as the model takes it.

b: samples, s: tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from llava_mcore.media.batch_fields import MEDIA_SEQLENS, Fields
from llava_mcore.parallel.items import MediaLengths


class TensorFields(Protocol):
    """The tensors of a micro-batch."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    media: dict[str, Tensor]
    cu_seqlens: Tensor
    dataset_ids: Tensor


class HostBatch(TensorFields, Protocol):
    """One micro-batch as a data loader yields it: CPU tensors; `num_tokens` excludes padding."""

    num_tokens: int


def no_dataset_ids() -> Tensor:
    """Return the `dataset_ids` of data that is one dataset."""
    return torch.empty(0, dtype=torch.int32)


@dataclass
class PackedSamples(PackedSeqParams):
    """The packed sequences of a row, whose bounds the host knows too: no layer waits for the device to tell them."""

    bounds: Sequence[int] = ()
    """The values of cu_seqlens_q, which are those of cu_seqlens_kv."""


@dataclass
class MicroBatch:
    """One micro-batch on the device.

    input_ids, labels: int64 [b, s]; loss_mask: float32 [b, s]; position_ids: int64 [b, s], or [axes, b, s].
    media: the architecture's fields (see `batch_fields`); empty except on the first stage, which reads them.
    cu_seqlens: int32 [sequences + 1], the starts of the packed sequences of the only row; empty if nothing is packed.
    bounds: the values of cu_seqlens, known without a device sync; empty: unknown.
    max_seqlen: length of the longest of them.
    num_trained: number of tokens that loss_mask counts, known without a device sync; None: unknown.
    max_media_seqlen: the largest of MEDIA_SEQLENS, for media that have them.
    media_lengths: values of fields from which ranks divide media (see `LENGTHS`), known without a device sync.
    dataset_ids: int32 [b, s], the index of each token's dataset in a blend; empty if there is one dataset.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    media: dict[str, Tensor]
    cu_seqlens: Tensor
    max_seqlen: int = 0
    num_trained: int | None = None
    max_media_seqlen: int = 0
    media_lengths: MediaLengths = field(default_factory=dict)
    dataset_ids: Tensor = field(default_factory=no_dataset_ids)
    bounds: Sequence[int] = ()

    @property
    def shape(self) -> tuple[int, int]:
        b, s = self.input_ids.shape
        return b, s

    @property
    def packed_seq_params(self) -> PackedSamples | None:
        """The parameters with which attention keeps packed sequences separate. Gemma 3 counts positions by them too."""
        if not self.cu_seqlens.numel():
            return None
        return PackedSamples(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            bounds=self.bounds or self.cu_seqlens.tolist(),  # once, not in every layer
        )


def pad_to(batch: TensorFields, length: int, fields: Fields) -> TensorFields:
    """Pad every sample to `length` tokens; padding is never trained on and comes after all text (causal)."""
    s = batch.input_ids.shape[1]
    if s == length:
        return batch

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, length - s))

    def moved(name: str, x: Tensor) -> Tensor:
        return x // s * length + x % s if fields[name].index_of == "tokens" else x

    bounds = batch.cu_seqlens
    if bounds.numel():  # the padding becomes a separate sequence
        bounds = torch.cat([bounds, bounds.new_tensor([length])])
    return MicroBatch(
        input_ids=padded(batch.input_ids),
        labels=padded(batch.labels),
        loss_mask=padded(batch.loss_mask),
        position_ids=padded(batch.position_ids),
        media={name: moved(name, x) for name, x in batch.media.items()},
        cu_seqlens=bounds,
        dataset_ids=padded(batch.dataset_ids) if batch.dataset_ids.numel() else batch.dataset_ids,
    )


def fill_rows(batch: TensorFields, rows: int) -> TensorFields:
    """Repeat the first row without loss and media until there are `rows`; a pipeline's messages need the same size."""
    missing = rows - len(batch.input_ids)
    if missing <= 0:
        return batch

    def filled(x: Tensor, fill: Tensor) -> Tensor:
        return torch.cat([x, fill.expand(*x.shape[:-2], missing, -1)], dim=-2)

    return MicroBatch(
        input_ids=filled(batch.input_ids, batch.input_ids[:1]),
        labels=filled(batch.labels, batch.labels[:1]),
        loss_mask=filled(batch.loss_mask, torch.zeros_like(batch.loss_mask[:1])),
        position_ids=filled(batch.position_ids, batch.position_ids[..., :1, :]),
        media=batch.media,
        cu_seqlens=batch.cu_seqlens,
        dataset_ids=filled(batch.dataset_ids, batch.dataset_ids[:1])
        if batch.dataset_ids.numel()
        else batch.dataset_ids,
    )


def without_loss(batch: TensorFields, fields: Fields) -> MicroBatch:
    """Return a micro-batch of the same shape without media that adds nothing to the loss."""
    return MicroBatch(
        input_ids=batch.input_ids,
        labels=batch.labels,
        loss_mask=torch.zeros_like(batch.loss_mask),
        position_ids=batch.position_ids,
        media={name: x if fields[name].shared else x[:0] for name, x in batch.media.items()},
        cu_seqlens=batch.cu_seqlens,
        dataset_ids=batch.dataset_ids,
    )


def longest(cu_seqlens: Tensor) -> int:
    """Return the length of the longest packed sequence; 0 if nothing is packed."""
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() else 0


def longest_media(media: Mapping[str, Tensor]) -> int:
    """Return the largest of MEDIA_SEQLENS; 0 if there are none."""
    lengths = media.get(MEDIA_SEQLENS)
    return 0 if lengths is None or not lengths.numel() else int(lengths.max())


def num_trained(batch: TensorFields) -> int:
    """Return the number of tokens that loss_mask counts."""
    return int(batch.loss_mask.count_nonzero())
