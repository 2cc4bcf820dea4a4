"""Tables: Parquet files, and the Arrow files of a saved Hugging Face dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.errors import DataError
from llava_mcore.prepare.row_types import BadSample, RowRange, SourceRow
from llava_mcore.prepare.sources.base import BLOCK, Cuts, Scan
from llava_mcore.prepare.sources.lines import too_large

ROWS_AT_ONCE = 16
"""Rows to read from a table at a time; pictures make them large."""
# pyarrow's own errors derive from these.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, NotImplementedError, MemoryError)


@dataclass(frozen=True, slots=True)
class ParquetTable:
    """A .parquet file, read by row groups, and only the needed columns."""

    path: Path
    name: str
    folder: Path
    columns: frozenset[str]
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """Read the footer, which has the number, offset and size of everything, and so changes with the data."""
        with self._open() as table:
            num_rows = int(table.metadata.num_rows)
        return Scan(cuts.by_number(num_rows), num_rows, _ends_hash(self.path))

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield rows of the row groups that the segment touches."""
        with self._open() as table:
            first, groups = 0, []
            skipped = None
            for group in range(table.metadata.num_row_groups):
                end = first + table.metadata.row_group(group).num_rows
                if end > segment.index and first < segment.index + segment.count:
                    skipped = segment.index - first if skipped is None else skipped
                    groups.append(group)
                first = end
            columns = [name for name in table.schema_arrow.names if name in self.columns]
            batches = table.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False)
            unread = tuple(name for name in table.schema_arrow.names if name not in self.columns)
            yield from _rows(self.path, batches, segment, skipped or 0, self.most_bytes, unread)

    def _open(self) -> pq.ParquetFile:
        # Without pre-buffering and with a read buffer, a row group is not kept in memory as a whole.
        return _opened(self.path, lambda: pq.ParquetFile(self.path, pre_buffer=False, buffer_size=BLOCK))


@dataclass(frozen=True, slots=True)
class ArrowTable:
    """A memory-mapped .arrow file."""

    path: Path
    name: str
    folder: Path
    columns: frozenset[str]
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """Count the rows of the record batches without reading them."""
        num_rows = sum(batch.num_rows for batch in _guarded(self.path, self._batches()))
        return Scan(cuts.by_number(num_rows), num_rows, _ends_hash(self.path))

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield rows; earlier ones are skipped without being read."""
        batches = self._batches()
        first = 0
        for batch in _guarded(self.path, batches):
            if first + batch.num_rows > segment.index:
                used = batch.select([name for name in batch.schema.names if name in self.columns])
                begin = max(0, segment.index - first)
                end = min(batch.num_rows, segment.index + segment.count - first)
                pieces = (used.slice(i, min(ROWS_AT_ONCE, end - i)) for i in range(begin, end, ROWS_AT_ONCE))
                part = RowRange(segment.file, 0, first + begin, end - begin)
                unread = tuple(name for name in batch.schema.names if name not in self.columns)
                yield from _rows(self.path, pieces, part, 0, self.most_bytes, unread)
            first += batch.num_rows
            if first >= segment.index + segment.count:
                return

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Yield record batches of either kind of Arrow file; `datasets` writes streams."""
        with pa.memory_map(str(self.path)) as source:
            try:
                stream = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                table = pa.ipc.open_file(source)
                yield from (table.get_batch(i) for i in range(table.num_record_batches))
                return
            yield from stream


def _rows(
    path: Path,
    batches: Iterator[pa.RecordBatch],
    segment: RowRange,
    skipped: int,
    most_bytes: int,
    unread: tuple[str, ...],
) -> Iterator[SourceRow]:
    """Yield the segment's rows from batches that start `skipped` rows before it. unread: columns left in the file."""
    left = segment.count
    for batch in _guarded(path, batches):
        passed = min(skipped, batch.num_rows)
        skipped -= passed
        for row in _as_rows(batch.slice(passed, min(left, batch.num_rows - passed)), most_bytes):
            yield SourceRow(segment.index + segment.count - left, row, unread)
            left -= 1
        if not left:
            return


def _as_rows(batch: pa.RecordBatch, most_bytes: int) -> Iterator[dict[str, Any] | BadSample]:
    """Yield rows as dictionaries; rows with too many bytes as the reason to skip them."""
    if batch.nbytes <= most_bytes:
        yield from batch.to_pylist()
        return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        yield too_large("a row", most_bytes) if row.nbytes > most_bytes else row.to_pylist()[0]


def _guarded(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Report errors of reading as DataError."""
    try:
        yield from batches
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _opened(path: Path, opens: Callable[[], Any]) -> Any:
    try:
        return opens()
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _ends_hash(path: Path) -> str:
    """Return a hash of a file's size, head and tail. The tail has Parquet's index."""
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        sha.update(file.read(BLOCK))
        file.seek(max(0, size - BLOCK))
        sha.update(file.read(BLOCK))
    return sha.hexdigest()
