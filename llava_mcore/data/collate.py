"""Encoded samples -> one padded batch. Pure tensor work."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llava_mcore.data.samples import Batch, EncodedSample
from llava_mcore.errors import DataError

MULTIPLE = 8
"""Lengths are rounded up to this: fewer shapes, and matrix units like it."""


def check_length(num_tokens: int, seq_length: int) -> None:
    """Raise DataError for a sample that does not fit; cutting it could cut a picture's placeholders in two."""
    if num_tokens > seq_length:
        raise DataError(
            f"the sample has {num_tokens} tokens (pictures included), but data.seq_length is {seq_length}; "
            "raise data.seq_length (--seq-length) or take the sample out"
        )


def collate(samples: Sequence[EncodedSample], *, seq_length: int, pad_token_id: int) -> Batch:
    """Pad every sample on the right to the longest one (a multiple of 8, at most seq_length) and shift the labels.

    Where a pipeline needs one length for all micro-batches of a step, it pads further by itself.
    A token is a label only if `trained` says so; the last position of a sample and all pads predict nothing.
    """
    longest = max(len(sample.input_ids) for sample in samples)
    length = min(-(-longest // MULTIPLE) * MULTIPLE, seq_length)
    shape = (len(samples), length)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    labels = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.float32)
    for row, sample in enumerate(samples):
        num_tokens = len(sample.input_ids)
        check_length(num_tokens, seq_length)
        next_trained = sample.trained[1:]
        input_ids[row, :num_tokens] = sample.input_ids
        labels[row, : num_tokens - 1] = sample.input_ids[1:] * next_trained
        loss_mask[row, : num_tokens - 1] = next_trained.to(torch.float32)
    keys = [sample.__key__ for sample in samples]
    return Batch(
        __key__=keys,
        __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
        input_ids=input_ids,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=torch.arange(length).repeat(len(samples), 1),
        pixel_values=torch.cat([sample.pixel_values for sample in samples]),
        image_positions=torch.cat([s.image_positions + row * length for row, s in enumerate(samples)]),
        sample_keys=keys,
        num_tokens=sum(len(sample.input_ids) for sample in samples),
    )
