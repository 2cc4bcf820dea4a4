"""Which stream the next micro-batch comes from, and which rank and loader process serve it.

A run divides its data over a fixed number S of streams. The micro-batches of all ranks together come from stream
0, 1, …, S - 1, 0, …, and of n data-parallel ranks, rank r takes those with the numbers r, r + n, r + 2n, … So n changes
nothing, nor does which process of a rank serves a stream.

If n divides S, rank r serves the streams s with s mod n = r. Otherwise several ranks read the same streams, and each
drops the batches of the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

NUM_STREAMS, MORE_STREAMS = 48, 768
"""Numbers with many divisors: a run can continue on every number of ranks that divides them without reading twice."""
LARGE = 200_000
"""Samples from which the data is divided into MORE_STREAMS, for the many ranks that train on it. Each stream first
chooses among as many samples as the packing buffer holds; with fewer samples, that would be much of the data."""


def default_num_streams(num_samples: int) -> int:
    """Return the number of streams for data of this size. It depends on nothing else, so that the order does not."""
    return NUM_STREAMS if num_samples < LARGE else MORE_STREAMS


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


def share(streams: Sequence[int], num_processes: int) -> list[list[int]]:
    """Divide a rank's streams over loader processes as evenly as possible; every process gets one."""
    processes = min(num_processes, len(streams))
    return [list(streams[process::processes]) for process in range(processes)]


class StreamTurn(NamedTuple):
    """A batch of a stream; its index is counted from 0 at the beginning of the run."""

    stream: int
    batch_index: int


class StreamTurns:
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

    def copy(self) -> StreamTurns:
        """Return the same turns, from the next one."""
        return StreamTurns(self.num_batches, self._rank, self._num_ranks)

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
