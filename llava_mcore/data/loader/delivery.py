"""Batches on their way from the streams of a loader process to the training process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from llava_mcore.data.loader.pixel_buffers import Buffered, PixelBuffers
from llava_mcore.data.loader.stream import Stream
from llava_mcore.data.loader.turns import Turns
from llava_mcore.data.samples import Batch
from llava_mcore.media.batch_fields import PIXEL_VALUES
from llava_mcore.media.pixels import as_used, in_memory


@dataclass
class Delivery:
    """A batch of a stream, and the stream's position after it as plain containers (None in validation)."""

    stream: int
    batch: Batch
    position: dict[str, Any] | None
    buffered: Buffered | None = None
    """Where the batch's pixels are, if they are not in the batch."""
    buffers: PixelBuffers | None = None

    def pin_memory(self) -> Self:
        """Copy the tensors to pinned memory (called by torch in a thread, so that a step does not wait for it)."""
        self.take_pixels(pinned=True)
        self.batch = self.batch.pin_memory()
        return self

    def take_pixels(self, *, pinned: bool) -> None:
        """Copy pixels from their buffer into the batch."""
        if self.buffers is not None and self.buffered is not None:
            self.batch.media[PIXEL_VALUES] = self.buffers.take(self.buffered, pinned=pinned)
            self.buffers = self.buffered = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the tensors except pixels as bytes for the pipe: shared memory for each of them would cost more."""
        fields = {f.name: getattr(self.batch, f.name) for f in dataclasses.fields(self.batch) if f.name != "media"}
        arrays = {name: value.numpy() for name, value in fields.items() if isinstance(value, Tensor)}
        pixels = in_memory(self.batch.media[PIXEL_VALUES]).contiguous()
        media = {name: value.numpy() for name, value in (self.batch.media | {PIXEL_VALUES: pixels}).items()}
        small = {name: vars(self)[name] for name in ("stream", "position", "buffered", "buffers")}
        return small | {"fields": fields | arrays, "arrays": list(arrays), "media": media}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields = state["fields"]
        fields |= {name: torch.from_numpy(fields[name]) for name in state["arrays"]}
        media = {name: torch.from_numpy(value) for name, value in state["media"].items()}
        media[PIXEL_VALUES] = as_used(media[PIXEL_VALUES])
        self.stream, self.position = state["stream"], state["position"]
        self.buffered, self.buffers = state["buffered"], state["buffers"]
        self.batch = Batch(**fields, media=media)


class StreamServer(IterableDataset[Delivery]):
    """Yields the deliveries of one loader process: its streams, in the order of all streams of the rank."""

    def __init__(self, streams: dict[int, Stream], turns: Turns, buffers: PixelBuffers | None) -> None:
        """streams: the streams of this process; turns: the order of all streams of the rank; buffers: None in the
        training process."""
        self.streams = streams
        self.buffers = buffers
        self._turns = turns

    def __iter__(self) -> Iterator[Delivery]:
        for stream_index, index in self._turns:
            if stream_index in self.streams:
                stream = self.streams[stream_index]
                batch = stream.batch(index)
                if batch is None:
                    return
                delivery = Delivery(stream_index, batch, stream.position())
                media = delivery.batch.media
                if self.buffers is not None:
                    delivery.buffered = self.buffers.put(media[PIXEL_VALUES])
                if delivery.buffered is not None:
                    media[PIXEL_VALUES], delivery.buffers = media[PIXEL_VALUES][:0], self.buffers
                yield delivery
