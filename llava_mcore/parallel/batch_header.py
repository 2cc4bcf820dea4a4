"""The shapes of a micro-batch's tensors, which every rank is told before they are sent.

b: samples, s: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llava_mcore.media.batch_fields import Field, Fields, in_memory
from llava_mcore.parallel.batch import TensorFields, longest, longest_media, num_trained

_DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32)
"""Dtypes of fields, by their number in the header."""
_NUM_OWN = 8
"""Numbers of a row of the header before those of the fields."""


@dataclass(frozen=True)
class BatchHeader:
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
    def of(cls, batch: TensorFields, fields: Fields) -> BatchHeader:
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
    def read(cls, row: Sequence[int], fields: Fields) -> BatchHeader:
        """The inverse of `counts`."""
        b, s, num_axes, num_bounds, of_blend, max_seqlen, num_trained, max_media_seqlen = row[:_NUM_OWN]
        rest = row[_NUM_OWN:]
        media = {}
        for name, field in fields.items():
            dtype, *shape = rest[: _width(field)]
            media[name] = (_DTYPES[dtype], shape)
            rest = rest[_width(field) :]
        return cls(b, s, num_axes, num_bounds, bool(of_blend), max_seqlen, num_trained, max_media_seqlen, media)


def header_width(fields: Fields) -> int:
    """Return how many numbers a row of the header has."""
    return _NUM_OWN + sum(map(_width, fields.values()))


def _width(field: Field) -> int:
    """Return how many numbers a field takes in the header: one for its dtype and those of its shape."""
    return 2 + len(field.item_shape)
