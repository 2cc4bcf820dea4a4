"""Shards of files at a URL that are read where they are, each once, from its beginning to its end.

This process reads on only when another one is free to write the next shard. The rows of a shard wait in a file of the
scratch folder, so neither memory nor disk hold more than a few shards, and the first one is written while most is still
on the server. A run that continues begins where the first missing shard does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import pyarrow as pa

from llava_mcore.prepare.row_types import RowRange, SourceRow
from llava_mcore.prepare.sources.base import BLOCK, RowReader
from llava_mcore.prepare.sources.lines import JsonLinesSource
from llava_mcore.prepare.sources.parquet import ParquetTable
from llava_mcore.prepare.sources.remote_file import RemoteFile
from llava_mcore.prepare.sources.tables import rows_of

CUTS = "cuts.jsonl"
"""File of the scratch folder with the places at which shards begin."""
Streamed = JsonLinesSource | ParquetTable


def is_streamed(file: object) -> TypeGuard[Streamed]:
    """Return whether a file's rows can be read where they are."""
    return isinstance(file, (JsonLinesSource, ParquetTable)) and isinstance(file.path, RemoteFile)


@dataclass(frozen=True, slots=True)
class NextRow:
    """Where the next row is."""

    file: int = 0
    index: int = 0
    """Number of the row within its file."""
    offset: int = 0
    """Byte of the file, for JSON lines."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows of a shard, and where the next shard begins."""

    ranges: tuple[RowRange, ...]
    following: NextRow


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """Rows of a streamed file, as its copies in the scratch folder have them."""

    source: Streamed
    scratch: Path

    @property
    def name(self) -> str:
        """Name of the source for users."""
        return self.source.name

    @property
    def folder(self) -> Path:
        """Base folder of relative paths of images."""
        return self.source.folder

    def path(self, row: int) -> Path:
        """Return the copy that begins with a row, counted over all files."""
        return self.scratch / f"rows-{row:012d}.part"

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield the rows of a copy, then remove it."""
        path, source = self.path(segment.row), self.source
        part = RowRange(segment.file, segment.row, 0, segment.count)
        if isinstance(source, JsonLinesSource):
            rows = replace(source, path=path).read(part)
        else:
            rows = _rows_of_table(path, part, source.most_bytes)
        try:
            for row in rows:
                yield replace(row, index=row.index + segment.index)
        finally:
            path.unlink()


def _rows_of_table(path: Path, part: RowRange, most_bytes: int) -> Iterator[SourceRow]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
        unread = json.loads((batches.schema.metadata or {}).get(b"unread", b"[]"))
        yield from rows_of(path, iter(batches), part, 0, most_bytes, tuple(unread))


class StreamedShards:
    """The shards of files, found one after the other."""

    def __init__(self, files: Sequence[Streamed], rows_per_shard: int, most_rows: int | None, scratch: Path) -> None:
        """most_rows: rows to take; None: all."""
        self.files: tuple[RowReader, ...] = tuple(WaitingRows(file, scratch) for file in files)
        self._waiting = [WaitingRows(file, scratch) for file in files]
        self._rows_per_shard = rows_per_shard
        self._most_rows = most_rows
        self._file = scratch / CUTS
        self._copier: _FileCopier | None = None

    def missing(self, done: set[int]) -> Iterator[tuple[int, tuple[RowRange, ...]]]:
        """Yield the shards that are not done, in order, as soon as their rows are in the scratch folder.

        Raises DataError if a file cannot be read on, or has changed.
        """
        cuts, num_shards = self._known()
        shard, row, place = 0, 0, NextRow()
        while shard != num_shards:
            known = cuts.get(shard)
            if known is None or shard not in done:
                left = self._rows_per_shard if self._most_rows is None else self._most_rows - row
                cut = self._copy(place, row, min(self._rows_per_shard, left))
                if not cut.ranges:
                    self._write({"shards": shard})
                    return
                if known is None:
                    self._write({"shard": shard, **_as_json(cut)})
                yield shard, cut.ranges
                known = cut
            place, row, shard = known.following, row + sum(part.count for part in known.ranges), shard + 1

    def _copy(self, place: NextRow, row: int, count: int) -> Cut:
        """Copy the next rows, those of each file to a copy of their own."""
        ranges: list[RowRange] = []
        while count and place.file < len(self._waiting):
            waiting = self._waiting[place.file]
            if self._copier is None or self._copier.place != place:
                self._copier = _copier_at(waiting.source, place)
            copied = self._copier.copy(count, waiting.path(row))
            if copied:
                ranges.append(RowRange(place.file, row, place.index, copied))
                row, count, place = row + copied, count - copied, self._copier.place
            else:
                waiting.path(row).unlink()
            if count:
                assert isinstance(waiting.source.path, RemoteFile)
                waiting.source.path.require_unchanged()
                place, self._copier = NextRow(place.file + 1), None
        return Cut(tuple(ranges), place)

    def _known(self) -> tuple[dict[int, Cut], int | None]:
        """Read the cuts that earlier runs have found, and the number of shards if one has found the end."""
        cuts, num_shards = dict[int, Cut](), None
        lines = self._file.read_bytes().splitlines(keepends=True) if self._file.is_file() else []
        full = [line for line in lines if line.endswith(b"\n")]
        if len(full) < len(lines):  # of a killed run
            self._file.write_bytes(b"".join(full))
        for entry in map(json.loads, full):
            if "shards" in entry:
                num_shards = entry["shards"]
            else:
                cuts[entry["shard"]] = Cut(
                    tuple(RowRange(*part) for part in entry["rows"]), NextRow(*entry["following"])
                )
        return cuts, num_shards

    def _write(self, entry: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _as_json(cut: Cut) -> dict[str, Any]:
    following = cut.following
    return {
        "rows": [(part.file, part.row, part.index, part.count) for part in cut.ranges],
        "following": (following.file, following.index, following.offset),
    }


class _FileCopier(Protocol):
    """Reads one file on."""

    place: NextRow

    def copy(self, count: int, path: Path) -> int:
        """Copy up to `count` rows to a file, and return their number; less only at the end."""
        ...


def _copier_at(source: Streamed, place: NextRow) -> _FileCopier:
    return _LineCopier(source, place) if isinstance(source, JsonLinesSource) else _TableCopier(source, place)


class _LineCopier:
    """Reads JSON lines on."""

    def __init__(self, source: JsonLinesSource, place: NextRow) -> None:
        self.place = place
        self._lines = source.path.open("rb")
        self._lines.seek(place.offset)

    def copy(self, count: int, path: Path) -> int:
        copied = size = 0
        with path.open("wb") as file:
            is_whole = True
            while copied < count or not is_whole:
                part = self._lines.readline(BLOCK)
                copied += is_whole and bool(part)
                is_whole = not part or part.endswith(b"\n")
                size += file.write(part)
                if not part:
                    break
        self.place = replace(self.place, index=self.place.index + copied, offset=self.place.offset + size)
        return copied


class _TableCopier:
    """Reads a Parquet file on."""

    def __init__(self, source: ParquetTable, place: NextRow) -> None:
        self.place = place
        self._batches = source.tables_from(place.index)
        self._rest: pa.RecordBatch | None = None
        self._unread: tuple[str, ...] = ()

    def copy(self, count: int, path: Path) -> int:
        copied, writer = 0, None
        with pa.OSFile(str(path), "wb") as file:
            while copied < count and (batch := self._next()) is not None:
                if writer is None:
                    schema = batch.schema.with_metadata({"unread": json.dumps(self._unread)})
                    writer = pa.ipc.new_stream(file, schema)
                part = batch.slice(0, count - copied)
                writer.write_batch(part.replace_schema_metadata(schema.metadata))
                copied += part.num_rows
                self._rest = batch.slice(part.num_rows) if part.num_rows < batch.num_rows else None
            if writer is not None:
                writer.close()
        self.place = replace(self.place, index=self.place.index + copied)
        return copied

    def _next(self) -> pa.RecordBatch | None:
        """Return rows that are not copied yet; None at the end."""
        if self._rest is None:
            self._rest, self._unread = next(self._batches, (None, self._unread))
        return self._rest
