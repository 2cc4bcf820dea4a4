"""The streams that the data is divided into, and the order in which ranks and loader processes serve them.

A run divides its data over a fixed number S of streams. Each has its own part of every dataset, shuffle buffer and
packing buffer, and a position that can be saved. The micro-batches of all ranks together come from stream
0, 1, …, S - 1, 0, …, and of n data-parallel ranks, rank r takes those with the numbers r, r + n, r + 2n, … So n changes
nothing, nor does which process of a rank serves a stream.

If n divides S, rank r serves the streams s with s mod n = r. Otherwise several ranks read the same streams, and each
drops the batches of the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.cache import NoCachePool
from megatron.energon.errors import SYSTEM_EXCEPTIONS, FatalSampleError
from torch.utils.data import IterableDataset

from llava_mcore.data.loader.sample_problems import Skips
from llava_mcore.data.loader.saved_position import from_plain, to_plain
from llava_mcore.data.loader.source import MEMORY_ADVICE, Delivery, PixelBuffers
from llava_mcore.data.samples import Batch, Skip
from llava_mcore.data.storage.remote import STORAGE_ERRORS, storage_message
from llava_mcore.errors import DataError, problems
from llava_mcore.media.batch_fields import PIXEL_VALUES

NUMBERS_OF_STREAMS = (48, 24, 12, 6, 4, 2, 1)
"""Numbers with many divisors: a run can continue on 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks without reading twice."""
LEAST_SAMPLES = 8
"""Minimum samples of a stream, so that a broken one does not leave it empty."""
SHOWN_SKIPS = 10
SHOWN_CHARS = 300
"""Beginning of energon's description of a sample, which has its key and shard."""
PLACE_EVERY = 16
"""Batches between two saved positions of a stream. Saving one costs about as much as decoding a picture; a resumed
stream builds the batches since the last one again and drops them."""


def default_num_streams(num_samples: int, dp_size: int) -> int:
    """Return a number that depends on the data alone for every dp_size that divides it, and for all with little data.

    Few samples are divided into fewer streams. Other numbers of ranks get a multiple of both if there is enough data.
    """
    limit = max(1, num_samples // LEAST_SAMPLES)
    usual = next(count for count in NUMBERS_OF_STREAMS if count <= limit)
    multiple = math.lcm(usual, dp_size)
    return multiple if multiple <= limit else usual


def streams_of_rank(num_streams: int, dp_rank: int, dp_size: int) -> list[int]:
    """Return the streams that a rank serves; other ranks serve them too if dp_size does not divide num_streams."""
    step = math.gcd(num_streams, dp_size)
    return list(range(dp_rank % step, num_streams, step))


def streams_to_count(num_streams: int, dp_rank: int, dp_size: int) -> list[int]:
    """Return the streams whose batches decide when it is a rank's turn: its own, or all that ranks share."""
    return streams_of_rank(num_streams, dp_rank, dp_size) if num_streams % dp_size == 0 else list(range(num_streams))


def states_to_read(num_states: int, num_streams: int, dp_rank: int, dp_size: int) -> range:
    """Return which of the states that data-parallel ranks have saved hold the positions that a rank needs.

    Stream s is in state s mod n of n states, and belongs to rank s mod dp. So a rank's streams are in the states whose
    number equals its own modulo gcd(n, dp): one if n = dp, two if half as many ranks continue. Where n or dp does not
    divide the number of streams, ranks share streams, and all states are needed.
    """
    if num_streams % num_states or num_streams % dp_size:
        return range(num_states)
    step = math.gcd(num_states, dp_size)
    return range(dp_rank % step, num_states, step)


def warnings_of_ranks(num_streams: int, dp_size: int) -> list[str]:
    """Return what the start of a run says if several ranks read the same streams."""
    if num_streams % dp_size == 0:
        return []
    times = dp_size // math.gcd(num_streams, dp_size)
    divisors = ", ".join(str(divisor) for divisor in range(1, num_streams + 1) if num_streams % divisor == 0)
    return [
        f"{dp_size} data-parallel ranks do not divide the {num_streams} streams of the data (data.num_streams): the "
        f"global batches are those of any number of ranks, but every rank reads {times} times as much as it uses. "
        f"Without that: {divisors} ranks, or a new run with another data.num_streams"
    ]


def num_given(position: dict[str, Any] | None) -> int:
    """Return the number of batches that a stream has returned up to a position; None: the beginning."""
    return 0 if position is None else position["num_batches"] + position["further"]


def position_at(before: dict[str, Any] | None, num_batches: int) -> dict[str, Any] | None:
    """Return the position after `num_batches` batches: an earlier one, from which further batches are built again."""
    if not num_batches:
        return None
    before = before or {"dataset": None, "num_batches": 0}
    return before | {"further": num_batches - before["num_batches"]}


def newest(states: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Return the position of every stream. Of several, all after the same batch, the one with fewest to build again."""
    positions: dict[int, Any] = {}
    for state in states:
        for index, position in state.items():
            before = positions.get(index)
            if before is None or (position is not None and position["num_batches"] > before["num_batches"]):
                positions[index] = position
    return positions


def scaled(position: dict[str, Any] | None, times: int) -> dict[str, Any] | None:
    """Return a position for micro-batches that are smaller by a factor of `times`."""
    if position is None:
        return None
    return {name: value * times if name in ("num_batches", "further") else value for name, value in position.items()}


class StreamTurn(NamedTuple):
    """A batch of a stream; its index is counted from 0 at the beginning of the run."""

    stream: int
    batch_index: int


class Turns:
    """The turns of one rank: every `num_ranks`-th of those of all ranks, which begin with number `rank`.

    The next turn is always that of the stream that has returned the fewest batches; the first if there are several.
    """

    def __init__(self, num_batches: dict[int, int], rank: int = 0, num_ranks: int = 1) -> None:
        """num_batches: number of batches that each stream has returned already."""
        self.num_batches = dict(num_batches)
        """After a turn: what the streams have returned once every rank has had as many turns."""
        self._queue = [(index, stream) for stream, index in num_batches.items()]
        heapq.heapify(self._queue)
        self._rank, self._num_ranks = rank, num_ranks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamTurn:
        turns = []
        for _ in range(self._num_ranks):
            index, stream = self._queue[0]
            turns.append(StreamTurn(stream, index))
            self.num_batches[stream] = index + 1
            heapq.heapreplace(self._queue, (index + 1, stream))
        return turns[self._rank]


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
        self._num_placed = 0
        self._batches: Iterator[Batch] | None = None

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from a position's saved state, before the first batch; `batch` builds the further ones again.

        KeyError or TypeError for an invalid position, DataError if its samples cannot be read again.
        """
        assert self._batches is None, "restore() comes before the first batch"
        if position["dataset"] is not None:
            try:
                self.dataset.restore_state(from_plain(position["dataset"]))
            except FatalSampleError as error:
                raise DataError(self._why_it_ended(error)) from error
        self._num_batches = self._num_placed = position["num_batches"]

    def position(self) -> dict[str, Any] | None:
        """Return the position after the last batch if one is due."""
        if self._num_batches // PLACE_EVERY == self._num_placed // PLACE_EVERY:
            return None
        self._num_placed = self._num_batches
        return {"dataset": to_plain(self.dataset.save_state()), "num_batches": self._num_batches, "further": 0}

    def __next__(self) -> Batch:
        """Return the next batch. DataError if too many samples in a row are broken, or the storage fails for good."""
        return self._take()

    def __iter__(self) -> Self:
        return self

    def batch(self, index: int) -> Batch:
        """Return the batch of a number, counted from 0, and drop those before it. Errors like the next one's."""
        while self._num_batches < index:
            self._take()
        return self._take()

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
        last = [str(skip) for skip in skips[-SHOWN_SKIPS:]]
        return problems(f"{len(skips)} samples in a row cannot be used; the last ones", last)


def _cause(error: BaseException) -> BaseException | None:
    """Return the error for which energon has raised one of its own, perhaps several times."""
    cause: BaseException | None = error
    while isinstance(cause, FatalSampleError):
        cause = cause.__cause__ or cause.__context__
    return cause


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
                delivery = Delivery(stream_index, stream.batch(index), stream.position())
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
