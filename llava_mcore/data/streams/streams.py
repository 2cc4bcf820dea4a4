"""The streams that the data is divided into, and the order in which ranks and loader processes serve them.

A run divides its data over a fixed number S of streams. Each has its own part of every dataset, shuffle buffer and
packing buffer, and a position that can be saved. Of n data-parallel ranks, rank r serves the streams s with s mod n =
r,
always the one that has returned the fewest batches. So the micro-batches of all ranks together come from stream
0, 1, …, S - 1, 0, … whatever n is, and which process of a rank serves a stream changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.cache import NoCachePool
from megatron.energon.errors import SYSTEM_EXCEPTIONS, FatalSampleError
from torch import Tensor
from torch.utils.data import IterableDataset

from llava_mcore.batch_fields import PIXEL_VALUES
from llava_mcore.data.samples import Batch, Skip
from llava_mcore.data.storage.remote import STORAGE_ERRORS, storage_message
from llava_mcore.data.streams.energon_state import from_plain, to_plain
from llava_mcore.data.streams.pixel_buffers import Buffered, PixelBuffers
from llava_mcore.data.streams.skips import Skips
from llava_mcore.errors import DataError, problems
from llava_mcore.pixels import as_used, in_memory

LEAST_STREAMS = 16
"""So that a run that starts on one rank can continue on up to 16."""
STREAMS_PER_RANK = 2
"""So that a run can continue on twice as many ranks."""
LEAST_SAMPLES = 8
"""Minimum samples of a stream, so that a broken one does not leave it empty."""
SHOWN_SKIPS = 10
SHOWN_CHARS = 300
"""Beginning of energon's description of a sample, which has its key and shard."""
MEMORY_ADVICE = (
    "if memory ran out, lower data.num_workers, data.shuffle_buffer_size or data.packing_buffer_size, or let large "
    "pictures be skipped (data.max_picture_pixels)"
)
PLACE_EVERY = 16
"""Batches between two saved positions of a stream. Saving one costs about as much as decoding a picture; a resumed
stream builds the batches since the last one again and drops them."""


def default_num_streams(dp_size: int, num_workers: int, num_samples: int) -> int:
    """Return a multiple of dp_size that every loader process of a rank can serve equally many of.

    Few samples are divided into fewer streams, but never fewer than ranks.
    """
    per_rank = max(STREAMS_PER_RANK, math.ceil(LEAST_STREAMS / dp_size))
    workers = max(1, num_workers)
    wanted = dp_size * workers * math.ceil(per_rank / workers)
    return max(dp_size, min(wanted, num_samples // LEAST_SAMPLES // dp_size * dp_size))


def streams_of_rank(num_streams: int, dp_rank: int, dp_size: int) -> list[int]:
    """Return the streams that a rank serves. DataError if there are fewer streams than ranks."""
    if num_streams < dp_size:
        raise DataError(
            f"the data is divided into {num_streams} streams, which {dp_size} data-parallel ranks cannot share; "
            f"continue with {num_streams} ranks at most, or start a run with a larger data.num_streams"
        )
    return list(range(dp_rank, num_streams, dp_size))


def position_after(before: dict[str, Any] | None, delivery: Delivery) -> dict[str, Any]:
    """Return the position after a delivery: its own, or the previous one with one more batch to build again.

    Args:
        before: the position before the delivery; None at the beginning.
    """
    if delivery.position is not None:
        return delivery.position
    before = before or {"dataset": None, "num_batches": 0, "further": 0}
    return before | {"further": before["further"] + 1}


def num_given(position: dict[str, Any]) -> int:
    """Return the number of batches that a stream has returned up to a position."""
    return position["num_batches"] + position["further"]


def scaled(position: dict[str, Any] | None, times: int) -> dict[str, Any] | None:
    """Return a position for micro-batches that are smaller by a factor of `times`."""
    if position is None:
        return None
    return {name: value * times if name in ("num_batches", "further") else value for name, value in position.items()}


class RoundRobin:
    """Yields the stream that has returned the fewest batches; the first if there are several."""

    def __init__(self, num_batches: dict[int, int]) -> None:
        """num_batches: number of batches that each stream has returned already."""
        self._num_batches = dict(num_batches)

    def __iter__(self) -> Iterator[int]:
        while True:
            stream = min(self._num_batches, key=lambda s: (self._num_batches[s], s))
            self._num_batches[stream] += 1
            yield stream


@dataclass
class Delivery:
    """A batch of a stream and, for some batches, the stream's position after it as plain containers."""

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
        own = {name: vars(self)[name] for name in ("stream", "position", "buffered", "buffers")}
        return own | {"fields": fields | arrays, "arrays": list(arrays), "media": media}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields = state["fields"]
        fields |= {name: torch.from_numpy(fields[name]) for name in state["arrays"]}
        media = {name: torch.from_numpy(value) for name, value in state["media"].items()}
        media[PIXEL_VALUES] = as_used(media[PIXEL_VALUES])
        self.stream, self.position = state["stream"], state["position"]
        self.buffered, self.buffers = state["buffered"], state["buffers"]
        self.batch = Batch(**fields, media=media)


class Stream:
    """One stream: an energon dataset with a position, endless in training."""

    def __init__(self, dataset: SavableDataset[Batch], workers: WorkerConfig, skips: Skips, *, name: str) -> None:
        """name: name of the data, for messages."""
        self.dataset = dataset
        self._name = name
        self._workers = workers
        self._skips = skips
        self._cache = NoCachePool()
        self._num_batches = 0
        self._num_known = 0
        self._batches: Iterator[Batch] | None = None

    def restore(self, position: dict[str, Any]) -> None:
        """Continue after a position, before the first batch.

        KeyError or TypeError for an invalid one, DataError if its samples cannot be read again.
        """
        assert self._batches is None, "restore() comes before the first batch"
        if position["dataset"] is not None:
            try:
                self.dataset.restore_state(from_plain(position["dataset"]))
            except FatalSampleError as error:
                raise DataError(self._why_it_ended(error)) from error
        self._num_batches = position["num_batches"]
        self._num_known = num_given(position)

    def position(self) -> dict[str, Any] | None:
        """Return the position after the last batch if one is due."""
        if self._num_batches % PLACE_EVERY:
            return None
        return {"dataset": to_plain(self.dataset.save_state()), "num_batches": self._num_batches, "further": 0}

    def __next__(self) -> Batch:
        """Return the next batch. DataError if too many samples in a row are broken, or the storage fails for good."""
        while self._num_batches < self._num_known:
            self._take()
        return self._take()

    def __iter__(self) -> Self:
        return self

    def take_skips(self) -> list[Skip]:
        """Return the samples skipped since the last batch, after a stream has ended."""
        return self._skips.take()

    def _take(self) -> Batch:
        self._workers.worker_activate(self._num_batches, cache_pool=self._cache)
        try:
            if self._batches is None:
                self._batches = iter(self.dataset)
            batch = next(self._batches)
        except FatalSampleError as error:
            raise DataError(self._why_it_ended(error)) from error
        except STORAGE_ERRORS as error:
            message = storage_message(error)
            if message is None:
                raise
            raise DataError(f"{self._name} cannot be read: {message}") from error
        finally:
            self._workers.worker_deactivate()
        self._num_batches += 1
        batch.skipped = self._skips.take()
        return batch

    def _why_it_ended(self, error: FatalSampleError) -> str:
        """Return why energon has given up: a failure of the system, or many broken samples in a row."""
        cause = _cause(error)
        if isinstance(cause, SYSTEM_EXCEPTIONS):
            reason = f"{type(cause).__name__}: {cause}".removesuffix(": ")
            hint = f"; {MEMORY_ADVICE}" if isinstance(cause, MemoryError) else ""
            return f"{self._name} cannot be read: {reason}{hint}. {error!s:.{SHOWN_CHARS}}"
        skips = self._skips.take()
        shown = [str(skip) for skip in skips[-SHOWN_SKIPS:]]
        return problems(f"{len(skips)} samples in a row cannot be used; the last ones", shown)


def _cause(error: BaseException) -> BaseException | None:
    """Return the error for which energon has raised one of its own, perhaps several times."""
    cause: BaseException | None = error
    while isinstance(cause, FatalSampleError):
        cause = cause.__cause__ or cause.__context__
    return cause


class StreamServer(IterableDataset[Delivery]):
    """Yields the deliveries of one loader process: its streams, in the order of all streams of the rank."""

    def __init__(self, streams: dict[int, Stream], turns: RoundRobin, buffers: PixelBuffers | None) -> None:
        """streams: the streams of this process; turns: the order of all streams of the rank; buffers: None in the
        training process."""
        self.streams = streams
        self.buffers = buffers
        self._turns = turns

    def __iter__(self) -> Iterator[Delivery]:
        for number in self._turns:
            if number in self.streams:
                stream = self.streams[number]
                delivery = Delivery(number, next(stream), stream.position())
                media = delivery.batch.media
                if self.buffers is not None:
                    delivery.buffered = self.buffers.put(media[PIXEL_VALUES])
                if delivery.buffered is not None:
                    media[PIXEL_VALUES], delivery.buffers = media[PIXEL_VALUES][:0], self.buffers
                yield delivery


def share(streams: Sequence[int], num_processes: int) -> list[list[int]]:
    """Divide a rank's streams over loader processes as evenly as possible; every process gets one."""
    processes = min(num_processes, len(streams))
    return [list(streams[process::processes]) for process in range(processes)]
