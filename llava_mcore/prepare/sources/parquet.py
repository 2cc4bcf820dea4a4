"""Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.errors import DataError
from llava_mcore.files.atomic import move
from llava_mcore.prepare.row_types import RowRange, SourceRow
from llava_mcore.prepare.sources.arrow import ArrowTable
from llava_mcore.prepare.sources.base import BLOCK, Cuts, Scan
from llava_mcore.prepare.sources.remote_file import REMOTE_BLOCK, RemoteFile, RemoteRanges
from llava_mcore.prepare.sources.tables import ROWS_AT_ONCE, UNREADABLE, ends_hash, guarded, rows_of


@dataclass(frozen=True, slots=True)
class ParquetTable:
    """A .parquet file, read by row groups, and only the needed columns."""

    path: Path | RemoteFile
    name: str
    folder: Path
    columns: frozenset[str]
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """Read the footer, which has the number, offset and size of everything, and so changes with the data."""
        with self._open() as table:
            num_rows = int(table.metadata.num_rows)
        return Scan(cuts.by_number(num_rows), num_rows, ends_hash(self.path))

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield rows of the row groups that the segment touches."""
        with self._open() as table:
            batches, skipped = self._batches(table, segment.index, segment.count)
            yield from rows_of(self.path, batches, segment, skipped, self.most_bytes, self._unread(table))

    def tables_from(self, index: int) -> Iterator[tuple[pa.RecordBatch, tuple[str, ...]]]:
        """Yield some rows at a time from a row on, each with the names of the columns that are not read."""
        with self._open() as table:
            batches, skipped = self._batches(table, index, int(table.metadata.num_rows) - index)
            for batch in guarded(self.path, batches):
                passed = min(skipped, batch.num_rows)
                skipped -= passed
                yield batch.slice(passed), self._unread(table)

    def _batches(self, table: pq.ParquetFile, index: int, count: int) -> tuple[Iterator[pa.RecordBatch], int]:
        """Return batches of the row groups with some rows, and the number of rows in them before these."""
        first, groups = 0, []
        skipped = None
        for group in range(table.metadata.num_row_groups):
            end = first + table.metadata.row_group(group).num_rows
            if end > index and first < index + count:
                skipped = index - first if skipped is None else skipped
                groups.append(group)
            first = end
        columns = [name for name in table.schema_arrow.names if name in self.columns]
        batches = table.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False)
        return batches, skipped or 0

    def _unread(self, table: pq.ParquetFile) -> tuple[str, ...]:
        return tuple(name for name in table.schema_arrow.names if name not in self.columns)

    def has_bytes(self) -> bool:
        """Return whether a column that is read holds bytes, such as those of images."""
        with self._open() as table:
            return any("binary" in str(field.type) for field in table.schema_arrow if field.name in self.columns)

    def num_bytes(self) -> int:
        """Return the bytes of the needed columns, decompressed."""
        with self._open() as table:
            groups = [table.metadata.row_group(index) for index in range(table.metadata.num_row_groups)]
        chunks = (group.column(index) for group in groups for index in range(group.num_columns))
        return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.partition(".")[0] in self.columns)

    def copied_as_arrow(self, path: Path, most_rows: int | None = None) -> ArrowTable:
        """Write the needed columns into an Arrow file, whose rows can be read one by one, and return it.

        A row of a Parquet file cannot be: its row group is decoded up to it. Memory holds some rows. An existing file
        is kept. most_rows: the first rows that are needed; None: all.
        """
        with self._open() as table:
            num_rows = int(table.metadata.num_rows)
            left = num_rows if most_rows is None else min(most_rows, num_rows)
            if not path.is_file():
                partial = path.with_name(f"{path.name}.part")
                batches, _ = self._batches(table, 0, left)
                names = [name for name in table.schema_arrow.names if name in self.columns]
                schema = pa.schema([table.schema_arrow.field(name) for name in names])
                with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                    for batch in guarded(self.path, batches):
                        writer.write_batch(batch.slice(0, left))
                        left -= min(left, batch.num_rows)
                        if not left:
                            break
                move(partial, path)
            unread = self._unread(table)
        return ArrowTable(path, self.name, self.folder, self.columns, self.most_bytes, unread)

    def _open(self) -> pq.ParquetFile:
        # Without pre-buffering and with a read buffer, a row group is not kept in memory as a whole.
        path = self.path
        if isinstance(path, RemoteFile):
            return _opened(path, lambda: pq.ParquetFile(RemoteRanges(path), pre_buffer=False, buffer_size=REMOTE_BLOCK))
        return _opened(path, lambda: pq.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK))


def _opened(path: Path | RemoteFile, opens: Callable[[], Any]) -> Any:
    try:
        return opens()
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read: {error}") from error
