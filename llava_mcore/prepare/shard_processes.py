"""Several processes that write the shards of a source."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol

from llava_mcore.data.encode.assets import Assets
from llava_mcore.errors import DataError
from llava_mcore.prepare.counts import ShardReport
from llava_mcore.prepare.output.shard import ShardMaker, ShardSetup
from llava_mcore.prepare.shard_plan import Rows
from llava_mcore.processes.forkserver import PRELOADED, end_with_parent, start_forkserver

SECONDS_BETWEEN_LOOKS = 0.25
SHARDS_AHEAD = 2
"""Number of shards queued for each process."""


class PrepareProgress(Protocol):
    """Receives progress reports."""

    def begin(self, activity: str, total: int | None) -> None:
        """Start a step of `total` rows or shards; None if unknown."""
        ...

    def advance(self, count: int) -> None:
        """Report that `count` more are done."""
        ...


def make_shards(
    setup: ShardSetup,
    assets: Assets | None,
    shards: Iterable[tuple[int, tuple[Rows, ...]]],
    num_shards: int | None,
    num_workers: int,
    progress: PrepareProgress,
) -> Iterator[ShardReport]:
    """Yield the reports of shards as they are completed, in any order.

    Args:
        shards: read on only when a process is free for the next one.
        num_shards: None if not known yet.
    """
    num_workers = num_workers if num_shards is None else min(num_workers, num_shards)
    if num_workers == 0 or num_shards == 1:  # starting processes takes seconds
        maker = ShardMaker(setup, assets, lambda: progress.advance(1))
        for shard, segments in shards:
            yield maker.make(shard, segments)
        return
    # Processes are forked from a server that has imported everything and has no threads, unlike this process.
    context = multiprocessing.get_context("forkserver")
    start_forkserver(PRELOADED, __name__)
    counter: Synchronized[int] = context.Value("q", 0)
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_process, initargs=(setup, counter))
    try:
        yield from _collect(pool, shards, num_workers, _Reader(counter, progress.advance))
    except BrokenProcessPool as error:
        raise DataError(
            f"a process was killed, perhaps because memory ran out (see --num-workers); {setup.folder} is incomplete, "
            "run the same command to continue"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Reader:
    """Passes on the progress of other processes since the last call."""

    def __init__(self, counter: Synchronized[int], advance: Callable[[int], None]) -> None:
        self._counter, self._advance, self._seen = counter, advance, 0

    def look(self) -> None:
        now = self._counter.value
        self._advance(now - self._seen)
        self._seen = now


def _collect(
    pool: ProcessPoolExecutor, shards: Iterable[tuple[int, tuple[Rows, ...]]], num_workers: int, reader: _Reader
) -> Iterator[ShardReport]:
    waiting = iter(shards)
    running: set[Future[ShardReport]] = set()
    error: DataError | None = None
    ended = False
    while running or not ended:
        if not ended and len(running) < num_workers * SHARDS_AHEAD:
            try:
                following = next(waiting, None)
            except DataError as problem:  # of a source that cannot be read on: the shards that have begun are finished
                following, error = None, problem
            ended = following is None
            if following is not None:
                running.add(pool.submit(_make_shard, *following))
        is_full = ended or len(running) == num_workers * SHARDS_AHEAD
        done, running = wait(running, SECONDS_BETWEEN_LOOKS if is_full else 0, FIRST_COMPLETED)
        reader.look()
        for future in done:
            yield future.result()
    if error is not None:
        raise error


_maker: ShardMaker | None = None
"""The maker of this process, if it belongs to the pool."""


def _start_process(setup: ShardSetup, counter: Synchronized[int]) -> None:
    global _maker
    counting = setup.options.counting
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the main process ends the others
    end_with_parent()

    def count() -> None:
        with counter.get_lock():
            counter.value += 1

    _maker = ShardMaker(setup, None if counting is None else counting.load(), count)


def _make_shard(shard: int, segments: tuple[Rows, ...]) -> ShardReport:
    assert _maker is not None
    return _maker.make(shard, segments)
