"""Prepares one source: several processes write the missing shards, then the dataset is completed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from llava_mcore.config.sections.data import Handling
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.tokens import origin_of
from llava_mcore.data.storage.dataset_path import MANIFEST
from llava_mcore.errors import DataError
from llava_mcore.files.atomic import move, sync
from llava_mcore.files.sizes import size_text
from llava_mcore.prepare.counts import PrepareCounts, ShardReport, add_up
from llava_mcore.prepare.journal import META, SCRATCH, Journal, write_whole
from llava_mcore.prepare.output.finish import split_shards, write_meta
from llava_mcore.prepare.output.shard import ShardSetup
from llava_mcore.prepare.row_types import Skipped
from llava_mcore.prepare.shard_plan import Options, Rows, ShardList, SourcePaths, make_plan
from llava_mcore.prepare.shard_processes import PrepareProgress, make_shards
from llava_mcore.prepare.sources.base import RowReader
from llava_mcore.prepare.sources.parquet import ParquetTable
from llava_mcore.prepare.streamed_shards import StreamedShards, is_streamed

SKIPPED = "skipped.jsonl"
OFFSETS = "rows.u64"
"""File of the scratch folder with the places of shuffled rows."""
NUM_FIRST = 10
"""Number of skipped rows to show."""


@dataclass(frozen=True, slots=True)
class SplitPart:
    """How much of a dataset is for training, or for validation."""

    shards: int
    samples: int


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
    mark_advice: Mapping[str, str] = field(default_factory=dict)
    """`ChatFormat.mark_advice`"""
    timed: bool = True
    """Whether a video's tokens or positions depend on its fps, or it is not known which model will be trained."""
    own_text_warning: str | None = None
    """`ChatText.own_text_warning`"""
    notes: tuple[str, ...] = ()
    """Parts of the source that are not read."""
    parts: Mapping[str, SplitPart] = field(default_factory=dict)
    """Shards and samples for training and validation; empty if the dataset is not completed."""


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
    offsets_file = folder / SCRATCH / OFFSETS
    plan = make_plan(source, options, offsets_file, lambda name: progress.begin(f"reading through {name}", None))
    # Shards that an earlier start has finished are kept.
    with Journal(folder) as journal:
        journal.begin(plan.request, overwrite=overwrite)
        files, missing, num_missing, num_rows = _missing_shards(plan, options, journal)
        first = next(missing, None)
        written = set[int]()
        if first is not None:
            shutil.rmtree(folder / META, ignore_errors=True)  # so that nothing looks finished in the meantime
            (folder / MANIFEST).unlink(missing_ok=True)
            files = _with_rows_by_number(plan, files, options, journal.scratch, progress)
            progress.begin(folder.name, num_rows)
            # The others are written, in any order, and recorded one by one.
            setup = ShardSetup(files, plan.how, options, folder, journal.scratch, plan.order)
            for report in make_shards(setup, assets, chain([first], missing), num_missing, num_workers, progress):
                journal.add(report)
                written.add(report.shard)
        elif plan.rows_per_shard is not None and not journal.done():
            raise DataError(f"{', '.join(file.name for file in plan.files)}: there are no rows")
        return _finish(plan, options, journal, progress, written, max_skip_rate, assets, start)


def _missing_shards(
    plan: ShardList, options: Options, journal: Journal
) -> tuple[tuple[RowReader, ...], Iterator[tuple[int, tuple[Rows, ...]]], int | None, int | None]:
    """Return the files, the shards that are not written yet, and their number and rows; None if not known yet."""
    done = journal.done()
    if plan.rows_per_shard is not None:
        files = [*filter(is_streamed, plan.files)]
        streamed = StreamedShards(files, plan.rows_per_shard, options.most_rows, journal.scratch)
        return streamed.files, streamed.missing(done), None, None
    missing = sorted(set(range(len(plan.shards))) - done)
    num_rows = sum(part.count for shard in missing for part in plan.shards[shard])
    return plan.files, ((shard, plan.shards[shard]) for shard in missing), len(missing), num_rows


def _with_rows_by_number(
    plan: ShardList, files: tuple[RowReader, ...], options: Options, scratch: Path, progress: PrepareProgress
) -> tuple[RowReader, ...]:
    """Return the files such that a shuffled row is found without reading others: Parquet files are copied."""
    if plan.offsets is None or plan.order is None:
        return files
    plan.offsets.save(scratch / OFFSETS)
    tables = [file for file in plan.files if isinstance(file, ParquetTable)]
    needed, free = sum(file.num_bytes() for file in tables), shutil.disk_usage(scratch).free
    needed -= sum(path.stat().st_size for path in scratch.glob("*.arrow"))
    if needed > free:
        raise DataError(
            f"{scratch}: to shuffle Parquet files, their rows are copied here meanwhile, which takes about "
            f"{size_text(needed)}; {size_text(free)} are free. Free some, choose another --out, or give "
            "--keep-order, which needs no copy"
        )
    copied = list(files)
    for index, file in enumerate(files):
        if isinstance(file, ParquetTable):
            progress.begin(f"copying rows of {file.name}", None)
            most_rows = None if options.most_rows is None else options.most_rows - plan.order.first_rows[index]
            copied[index] = file.copied_as_arrow(scratch / f"{index:06d}.arrow", most_rows)
    return tuple(copied)


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
        write_meta(
            folder,
            reports,
            val_ratio=options.val_ratio,
            origin=origin,
            has_pairs=plan.how.keys.pairs,
            on_shard=lambda: progress.advance(1),
        )
        write_whole(folder / MANIFEST, _manifest(plan, reports, counts))
        for copy in (*journal.scratch.glob("*.arrow"), journal.scratch / OFFSETS):
            copy.unlink(missing_ok=True)
    # For the summary.
    rows_made = sum(report.counts.rows for report in reports if report.shard in written)
    seconds = time.perf_counter() - start
    handling = "text" if options.counting is None else options.counting.special_tokens_in_text
    advice = {} if assets is None else assets.chat.mark_advice
    timed = assets is None or assets.plan.timed
    warning = None if assets is None else assets.chat.own_text_warning
    parts = _parts(reports, options.val_ratio) if finished else {}
    about = (handling, advice, timed, warning, plan.notes, parts)
    return Result(folder, counts, num_shards, len(written), rows_made, seconds, first, finished, *about)


def _parts(reports: Sequence[ShardReport], val_ratio: float) -> dict[str, SplitPart]:
    samples = {report.name: report.counts.entries for report in reports if report.name is not None}
    split = split_shards([*samples], val_ratio)
    return {part: SplitPart(len(names), sum(samples[n] for n in names)) for part, names in split.items() if names}


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
