"""The Arrow files of a saved Hugging Face dataset, and those that Parquet files are copied to."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.prepare.row_types import RowRange, SourceRow
from llava_mcore.prepare.sources.base import Cuts, Scan
from llava_mcore.prepare.sources.tables import ROWS_AT_ONCE, ends_hash, guarded, rows_of

OPEN_FILES = 256
"""Files that stay mapped into memory, since shuffled rows come from any of them."""


@dataclass(frozen=True, slots=True)
class ArrowTable:
    """A memory-mapped .arrow file."""

    path: Path
    name: str
    folder: Path
    columns: frozenset[str]
    most_bytes: int = LIMITS.sample_bytes
    others: tuple[str, ...] = ()
    """Names of columns that were left out when the file was written."""

    def scan(self, cuts: Cuts) -> Scan:
        """Count the rows of the record batches without reading them."""
        (num_rows,) = guarded(self.path, (batches_of(self.path).num_rows for _ in range(1)))
        return Scan(cuts.by_number(num_rows), num_rows, ends_hash(self.path))

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield rows; earlier ones are skipped without being read."""
        for part, batch in guarded(self.path, _parts(self.path, segment)):
            used = batch.select([name for name in batch.schema.names if name in self.columns])
            unread = (*self.others, *(name for name in batch.schema.names if name not in self.columns))
            yield from rows_of(self.path, _pieces(used), part, 0, self.most_bytes, unread)


class RecordBatches:
    """The record batches of an Arrow file of either kind; `datasets` writes streams."""

    def __init__(self, path: Path) -> None:
        """Map the file into memory, and find the first row of each batch."""
        source = pa.memory_map(str(path))
        try:
            self._batches: list[pa.RecordBatch] | pa.RecordBatchFileReader = [*pa.ipc.open_stream(source)]
            counts = [batch.num_rows for batch in self._batches]
        except pa.ArrowInvalid:
            source.seek(0)
            self._batches = reader = pa.ipc.open_file(source)
            counts = [reader.get_batch(index).num_rows for index in range(reader.num_record_batches)]
        self._firsts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return int(self._firsts[-1])

    def range(self, first: int, count: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches of consecutive rows, with the number of the first row of each."""
        index = int(np.searchsorted(self._firsts, first, side="right")) - 1
        while first < (stop := min(first + count, self.num_rows)):
            start, end = int(self._firsts[index]), min(stop, int(self._firsts[index + 1]))
            batches = self._batches
            batch = batches[index] if isinstance(batches, list) else batches.get_batch(index)
            yield first, batch.slice(first - start, end - first)
            first, count, index = end, stop - end, index + 1


def batches_of(path: Path) -> RecordBatches:
    """Return the batches of a file. Few files are opened again, however often rows are read. ArrowInvalid, OSError."""
    stat = path.stat()
    return _batches_of(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(OPEN_FILES)
def _batches_of(path: Path, size: int, time: int) -> RecordBatches:
    return RecordBatches(path)


def _parts(path: Path, segment: RowRange) -> Iterator[tuple[RowRange, pa.RecordBatch]]:
    for first, batch in batches_of(path).range(segment.index, segment.count):
        yield RowRange(segment.file, 0, first, batch.num_rows), batch


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a few rows at a time, since images make them large."""
    return (batch.slice(i, ROWS_AT_ONCE) for i in range(0, batch.num_rows, ROWS_AT_ONCE))
