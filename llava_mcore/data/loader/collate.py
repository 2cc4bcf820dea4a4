"""Encoded samples -> one micro-batch, padded or packed. Pure tensor work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llava_mcore.data.loader.packing import round_up
from llava_mcore.data.samples import Batch, EncodedSample, TokenConversation
from llava_mcore.media.batch_fields import IMAGE_FIELDS, NO_SCALE, PIXEL_SCALE, PIXEL_VALUES, Fields
from llava_mcore.media.media import index_values, position_ids

BATCH_SUMS: dict[str, Callable[[Sequence[TokenConversation]], tuple[int, int]]] = {
    "num_truncated": lambda conversations: (sum(conversation.truncated for conversation in conversations), 0),
}
"""Sums over the conversations of a global batch that the log shows, by name: a function that returns total and count
for a micro-batch. The log has total / count over the global batch, or the total where nothing is counted."""


def collate(
    samples: Sequence[EncodedSample],
    *,
    seq_length: int,
    pad_token_id: int,
    packed: bool,
    multiple: int = 8,
    sample_multiple: int = 1,
    pixel_scale: Tensor = NO_SCALE,
    fields: Fields = IMAGE_FIELDS,
    num_axes: int = 1,
    of_blend: bool = False,
) -> Batch:
    """Make one micro-batch.

    Only `trained` tokens are labels; the last position of a conversation and padding predict nothing.

    Args:
        multiple: lengths are rounded up to a multiple of this, for fewer shapes and faster matrix products.
        sample_multiple: the same for each conversation of a pack, for context-parallel ranks that divide it.
        pixel_scale: the scale of the image processor.
        fields: the fields of the media.
        num_axes: axes of a position.
        of_blend: there are several datasets, so the batch says which one a token belongs to.
    """
    media = _MediaCollator(fields, pixel_scale, num_axes)
    if packed:
        batch, places = _pack(samples, media, seq_length, pad_token_id, multiple, sample_multiple)
    else:
        batch, places = _pad(samples, media, seq_length, pad_token_id, multiple)
    # Which dataset each token of a conversation comes from, for losses per dataset.
    if of_blend:
        conversations = [conversation for sample in samples for conversation in sample.conversations]
        batch.dataset_ids = torch.zeros(batch.input_ids.shape, dtype=torch.int32)
        for conversation, (row, start) in zip(conversations, places, strict=True):
            batch.dataset_ids[row, start : start + len(conversation)] = conversation.dataset
    return batch


@dataclass(frozen=True)
class _MediaCollator:
    """Concatenates the media of a micro-batch."""

    fields: Fields
    pixel_scale: Tensor
    num_axes: int

    def position_ids(
        self,
        plain: NDArray[np.int64],
        conversations: Sequence[TokenConversation],
        places: Sequence[tuple[int, int]],
    ) -> NDArray[np.int64]:
        """Return the positions [axes, b, s] of rows whose plain ones are [b, s]; these themselves for one axis."""
        if self.num_axes == 1:
            return plain
        ids = np.tile(plain, (self.num_axes, 1, 1))
        for conversation, (row, start) in zip(conversations, places, strict=True):
            images, starts = [x.tokens for x in conversation.media], [x.start for x in conversation.media]
            own_ids = position_ids(len(conversation), images, starts, self.num_axes)
            ids[:, row, start : start + len(conversation)] = own_ids
        return ids

    def tensors(
        self, pixels: Sequence[Tensor], conversations: Sequence[TokenConversation], starts: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return every field. `starts`: start of each conversation in the flattened [b * s]."""
        images = [item.tokens for conversation in conversations for item in conversation.media]
        begins = [start + item.start for c, start in zip(conversations, starts, strict=True) for item in c.media]
        pixel_fields = {PIXEL_VALUES: _together(pixels), PIXEL_SCALE: self.pixel_scale}
        return pixel_fields | index_values(self.fields, images, begins)


def _pad(
    samples: Sequence[EncodedSample], media: _MediaCollator, seq_length: int, pad_token_id: int, multiple: int
) -> tuple[Batch, list[tuple[int, int]]]:
    """Pad every conversation, one per sample, on the right to the longest one (rounded up, at most seq_length).

    A pipeline needs the same length for all micro-batches of a step, and pads further by itself. Returns also row and
    column of each conversation, as `_pack` does.
    """
    conversations = [sample.conversations[0] for sample in samples]
    length = _rounded(max(map(len, conversations)), multiple, seq_length)
    plain = np.tile(np.arange(length), (len(samples), 1))
    places = [(row, 0) for row in range(len(samples))]
    return _batch(samples, conversations, places, plain, pad_token_id, media), places


def _pack(
    samples: Sequence[EncodedSample],
    media: _MediaCollator,
    seq_length: int,
    pad_token_id: int,
    multiple: int,
    sample_multiple: int,
) -> tuple[Batch, list[tuple[int, int]]]:
    """Concatenate all conversations into one row; b packs give at most b * seq_length tokens. The padding that
    rounds up a conversation counts as a part of it."""
    conversations = [conversation for sample in samples for conversation in sample.conversations]
    ends = np.cumsum([0, *(round_up(len(conversation), sample_multiple) for conversation in conversations)])
    length = _rounded(int(ends[-1]), multiple, seq_length * len(samples))
    bounds = ends if ends[-1] == length else np.append(ends, length)
    # Positions restart with each conversation, and with the padding.
    plain = np.arange(length) - np.repeat(bounds[:-1], np.diff(bounds))
    places = [(0, int(start)) for start in ends[:-1]]
    batch = _batch(samples, conversations, places, plain[None], pad_token_id, media)
    batch.cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
    return batch, places


def _rounded(length: int, multiple: int, limit: int) -> int:
    return min(round_up(length, multiple), limit)


def _batch(
    samples: Sequence[EncodedSample],
    conversations: Sequence[TokenConversation],
    places: Sequence[tuple[int, int]],
    plain: NDArray[np.int64],
    pad_token_id: int,
    media: _MediaCollator,
) -> Batch:
    """Write conversations into rows, each starting at its (row, column). `plain`: positions [b, s] of text alone."""
    # The token at i predicts the one at i + 1, so labels and mask are shifted, and the last token has none.
    shape = plain.shape
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.float32)
    for conversation, (row, start) in zip(conversations, places, strict=True):
        end, trained = start + len(conversation), conversation.trained[1:]
        input_ids[row, start:end] = conversation.input_ids
        np.multiply(conversation.input_ids[1:], trained, out=labels[row, start : end - 1])
        loss_mask[row, start : end - 1] = trained
    # Fields of media may be indices of tokens in the flattened batch [b * s].
    starts = [row * shape[1] + start for row, start in places]
    return Batch(
        __key__=[sample.__key__ for sample in samples],
        __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=torch.from_numpy(media.position_ids(plain, conversations, places)),
        media=media.tensors([sample.pixel_values for sample in samples], conversations, starts),
        sample_keys=[conversation.key for conversation in conversations],
        num_tokens=sum(map(len, conversations)),
        num_pairs=sum(n * (n + 1) // 2 for n in map(len, conversations)),
        sums={name: count(conversations) for name, count in BATCH_SUMS.items()},
        typed_tokens={token: conversation.key for conversation in conversations for token in conversation.typed},
        without_fps=next((conversation.key for conversation in conversations if conversation.num_without_fps), None),
    )


def _together(pixels: Sequence[Tensor]) -> Tensor:
    """Return the tiles or patches of all samples as one tensor, in channels-last layout."""
    layout = torch.channels_last if pixels[0].ndim == 4 else torch.contiguous_format
    if len(pixels) == 1:  # a pack alone in its micro-batch has that layout already
        return pixels[0].contiguous(memory_format=layout)
    shape = (sum(map(len, pixels)), *pixels[0].shape[1:])
    together = torch.empty(shape, dtype=pixels[0].dtype, memory_format=layout)
    start = 0
    for part in pixels:
        together[start : start + len(part)].copy_(part)
        start += len(part)
    return together
