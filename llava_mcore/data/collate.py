"""Encoded samples -> one micro-batch, padded or packed. Pure tensor work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llava_mcore.data.samples import Batch, EncodedSample, TokenConversation
from llava_mcore.pixels import NO_SCALE


def collate(
    samples: Sequence[EncodedSample],
    *,
    seq_length: int,
    pad_token_id: int,
    packed: bool,
    multiple: int = 8,
    pixel_scale: Tensor = NO_SCALE,
) -> Batch:
    """Make one micro-batch.

    A token is a label only if `trained` says so; the last position of a conversation and all pads predict nothing.

    Args:
        multiple: lengths are rounded up to this: fewer shapes, and matrix units like or even need it.
        pixel_scale: that of the image processor.
    """
    make = pack if packed else pad
    batch = make(samples, seq_length=seq_length, pad_token_id=pad_token_id, multiple=multiple)
    batch.pixel_scale = pixel_scale
    return batch


def pad(samples: Sequence[EncodedSample], *, seq_length: int, pad_token_id: int, multiple: int = 8) -> Batch:
    """Pad every conversation, one a sample, on the right to the longest one (rounded up, at most seq_length).

    Where a pipeline needs one length for all micro-batches of a step, it pads further by itself.
    """
    conversations = [sample.conversations[0] for sample in samples]
    length = _rounded(max(map(len, conversations)), multiple, seq_length)
    rows = [_row([conversation], length, pad_token_id) for conversation in conversations]
    positions = [c.image_positions + row * length for row, c in enumerate(conversations)]
    planes = [torch.cat(planes) for planes in zip(*rows, strict=True)]
    planes[3] = torch.arange(length).repeat(len(samples), 1)
    return _batch(samples, planes, positions)


def pack(samples: Sequence[EncodedSample], *, seq_length: int, pad_token_id: int, multiple: int = 8) -> Batch:
    """Put all conversations behind each other into one row; b packs give at most b * seq_length tokens."""
    conversations = [conversation for sample in samples for conversation in sample.conversations]
    ends = torch.tensor([0, *map(len, conversations)]).cumsum(0)
    length = _rounded(int(ends[-1]), multiple, seq_length * len(samples))
    positions = [c.image_positions + start for c, start in zip(conversations, ends[:-1], strict=True)]
    batch = _batch(samples, _row(conversations, length, pad_token_id), positions)
    bounds = ends if ends[-1] == length else torch.cat([ends, torch.tensor([length])])
    batch.cu_seqlens = bounds.to(torch.int32)
    return batch


def _rounded(length: int, multiple: int, most: int) -> int:
    return min(-(-length // multiple) * multiple, most)


def _row(conversations: Sequence[TokenConversation], length: int, pad_token_id: int) -> list[Tensor]:
    """Return input_ids, labels, loss_mask and position_ids [1, length] of conversations behind each other.

    Positions begin anew with each of them, and with the padding.
    """
    input_ids = torch.full((1, length), pad_token_id, dtype=torch.int64)
    labels = torch.zeros((1, length), dtype=torch.int64)
    loss_mask = torch.zeros((1, length), dtype=torch.float32)
    position_ids = torch.zeros((1, length), dtype=torch.int64)
    start = 0
    for conversation in conversations:
        end = start + len(conversation)
        learnt = conversation.trained[1:]
        input_ids[0, start:end] = conversation.input_ids
        labels[0, start : end - 1] = conversation.input_ids[1:] * learnt
        loss_mask[0, start : end - 1] = learnt.to(torch.float32)
        position_ids[0, start:end] = torch.arange(end - start)
        start = end
    position_ids[0, start:] = torch.arange(length - start)
    return [input_ids, labels, loss_mask, position_ids]


def _batch(samples: Sequence[EncodedSample], planes: Sequence[Tensor], positions: Sequence[Tensor]) -> Batch:
    conversations = [conversation for sample in samples for conversation in sample.conversations]
    input_ids, labels, loss_mask, position_ids = planes
    return Batch(
        __key__=[sample.__key__ for sample in samples],
        __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
        input_ids=input_ids,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=position_ids,
        # A pack alone in its micro-batch need not be copied.
        pixel_values=samples[0].pixel_values if len(samples) == 1 else torch.cat([s.pixel_values for s in samples]),
        pixel_scale=NO_SCALE,
        image_positions=torch.cat(list(positions)),
        sample_keys=[conversation.key for conversation in conversations],
        num_tokens=sum(map(len, conversations)),
        num_pairs=sum(n * (n + 1) // 2 for n in map(len, conversations)),
        num_truncated=sum(conversation.truncated for conversation in conversations),
    )
