"""Prepares one source: several processes write the missing shards, then the dataset is completed."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Protocol

from llava_mcore.config.sections.data import Handling
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.tokens import origin_of
from llava_mcore.data.storage.dataset_path import MANIFEST
from llava_mcore.errors import DataError
from llava_mcore.files.atomic import move, sync
from llava_mcore.prepare.counts import PrepareCounts, ShardReport, add_up
from llava_mcore.prepare.journal import META, Journal, write_whole
from llava_mcore.prepare.output.finish import write_meta
from llava_mcore.prepare.output.shard import ShardMaker, ShardSetup
from llava_mcore.prepare.row_types import RowRange, Skipped
from llava_mcore.prepare.shard_plan import Options, ShardList, SourcePaths, make_plan
from llava_mcore.processes.forkserver import PRELOADED, end_with_parent, start_forkserver

SKIPPED = "skipped.jsonl"
NUM_FIRST = 10
"""Number of skipped rows to show."""
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


@dataclass(frozen=True, slots=True)
class Result:
    """The contents of a finished folder."""

    folder: Path
    counts: PrepareCounts
    num_shards: int
    num_made: int
    """Shards that this run has written; the others existed."""
    rows_made: int
    seconds: float
    first_skipped: tuple[Skipped, ...]
    finished: bool
    """False: too many rows were skipped, so there are shards but no .nv-meta."""
    special_tokens_in_text: Handling = "text"
    timed: bool = True
    """Whether a video's tokens or positions depend on its fps, or it is not known which model will be trained."""
    own_text_warning: str | None = None
    """`ChatText.own_text_warning`"""
    notes: tuple[str, ...] = ()
    """Parts of the source that are not read."""


def prepare(
    source: SourcePaths,
    folder: Path,
    options: Options,
    progress: PrepareProgress,
    *,
    num_workers: int = 0,
    max_skip_rate: float = 0.01,
    overwrite: bool = False,
) -> Result:
    """Write a folder of shards of a source, or the missing ones.

    Args:
        num_workers: processes; 0: use this one. The shards do not depend on it.
        max_skip_rate: with a larger fraction of skipped rows, the dataset is not completed.
        overwrite: start again instead of continuing.

    Raises:
        DataError: before anything is written if the source, the tokenizer or the folder cannot be used, or the folder
            was started with another source or options; later if a file or a process fails.
    """
    start = time.perf_counter()
    assets = None if options.counting is None else options.counting.load()  # here, so that errors are reported at once
    plan = make_plan(source, options, lambda name: progress.begin(f"reading through {name}", None))
    # Shards that an earlier start has finished are kept.
    with Journal(folder) as journal:
        journal.begin(plan.request, overwrite=overwrite)
        missing = sorted(set(range(len(plan.shards))) - journal.done())
        if missing:
            shutil.rmtree(folder / META, ignore_errors=True)  # so that nothing looks finished in the meantime
            (folder / MANIFEST).unlink(missing_ok=True)
            progress.begin(folder.name, sum(s.count for shard in missing for s in plan.shards[shard]))
        # The others are written, in any order, and recorded one by one.
        setup = ShardSetup(plan.files, plan.how, options, folder, journal.scratch)
        for report in _make(setup, assets, {shard: plan.shards[shard] for shard in missing}, num_workers, progress):
            journal.add(report)
        return _finish(plan, options, journal, progress, set(missing), max_skip_rate, assets, start)


def _finish(
    plan: ShardList,
    options: Options,
    journal: Journal,
    progress: PrepareProgress,
    written: set[int],
    max_skip_rate: float,
    assets: Assets | None,
    start: float,
) -> Result:
    folder = journal.folder
    # Count, and complete the dataset unless too much was skipped: training takes it only with .nv-meta.
    first = _write_skipped(folder / SKIPPED, journal)
    reports = [replace(report, skipped=()) for report in journal.reports()]
    counts = add_up(report.counts for report in reports)
    num_shards = sum(report.name is not None for report in reports)
    finished = counts.conversations > 0 and counts.skip_rate <= max_skip_rate
    if not finished:
        shutil.rmtree(folder / META, ignore_errors=True)
        (folder / MANIFEST).unlink(missing_ok=True)
    elif not (folder / MANIFEST).is_file() or not (folder / META).is_dir():
        progress.begin("indexing shards", num_shards)
        origin = None if assets is None else origin_of(assets.chat.fingerprint, assets.pixel_ranges)
        write_meta(folder, reports, val_ratio=options.val_ratio, origin=origin, on_shard=lambda: progress.advance(1))
        write_whole(folder / MANIFEST, _manifest(plan, reports, counts))
    # For the summary.
    rows_made = sum(report.counts.rows for report in reports if report.shard in written)
    seconds = time.perf_counter() - start
    handling = "text" if options.counting is None else options.counting.special_tokens_in_text
    timed = assets is None or assets.plan.timed
    warning = None if assets is None else assets.chat.own_text_warning
    about = (handling, timed, warning, plan.notes)
    return Result(folder, counts, num_shards, len(written), rows_made, seconds, first, finished, *about)


def _manifest(plan: ShardList, reports: Sequence[ShardReport], counts: PrepareCounts) -> str:
    shards = [
        {
            "name": r.name,
            "samples": r.counts.entries,
            "conversations": r.counts.conversations,
            "bytes": r.counts.bytes,
            "sha256": r.sha256,
        }
        for r in reports
        if r.name is not None
    ]
    return json.dumps({**plan.request, "totals": counts.to_json(), "shards": shards}, indent=1)


def _write_skipped(path: Path, journal: Journal) -> tuple[Skipped, ...]:
    """Write the list of skipped rows in the order of the source; return the first ones."""
    first: list[Skipped] = []
    temporary = journal.scratch / f"{path.name}.part"
    with temporary.open("w", encoding="utf-8") as file:
        for report in journal.reports():
            first += report.skipped[: NUM_FIRST - len(first)]
            file.writelines(json.dumps(line.to_json(), ensure_ascii=False) + "\n" for line in report.skipped)
    sync(temporary)
    move(temporary, path)
    return tuple(first)


# -- processes -------------------------------------------------------------------------------------------------------


def _make(
    setup: ShardSetup,
    assets: Assets | None,
    shards: dict[int, tuple[RowRange, ...]],
    num_workers: int,
    progress: PrepareProgress,
) -> Iterator[ShardReport]:
    """Yield the reports of shards as they are completed, in any order."""
    if not shards:
        return
    num_workers = min(num_workers, len(shards))
    if num_workers == 0 or len(shards) == 1:  # starting processes takes seconds
        maker = ShardMaker(setup, assets, lambda: progress.advance(1))
        for shard, segments in shards.items():
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
    pool: ProcessPoolExecutor, shards: dict[int, tuple[RowRange, ...]], num_workers: int, reader: _Reader
) -> Iterator[ShardReport]:
    waiting = iter(shards.items())
    running: set[Future[ShardReport]] = set()
    while True:
        while len(running) < num_workers * SHARDS_AHEAD and (following := next(waiting, None)) is not None:
            running.add(pool.submit(_make_shard, *following))
        if not running:
            return
        done, running = wait(running, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
        reader.look()
        for future in done:
            yield future.result()


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


def _make_shard(shard: int, segments: tuple[RowRange, ...]) -> ShardReport:
    assert _maker is not None
    return _maker.make(shard, segments)
