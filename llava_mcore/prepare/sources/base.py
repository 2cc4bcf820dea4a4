"""The interface of source files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llava_mcore.prepare.row_types import RowRange, SourceRow
from llava_mcore.prepare.shuffle import RowOffsets

BLOCK = 1 << 20
"""Bytes to read at a time."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of reading through a file once."""

    segments: tuple[RowRange, ...]
    num_rows: int
    fingerprint: str
    """Changes if the file's rows change."""
    notes: tuple[str, ...] = ()
    """Parts of the file that are not read."""


class RowReader(Protocol):
    """Rows that processes write into shards. Small, and sent to every process."""

    @property
    def name(self) -> str:
        """Its name for users; written into every sample."""
        ...

    @property
    def folder(self) -> Path:
        """Base folder of relative paths of images."""
        ...

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield the rows of a segment, which is a single row if rows are shuffled.

        Raises DataError if the file can no longer be read.
        """
        ...


class SourceFile(RowReader, Protocol):
    """One file (or folder) of rows."""

    def scan(self, cuts: Cuts) -> Scan:
        """Read through the file once, in little memory. DataError if it cannot be read."""
        ...


PLACED = RowRange(0, 0, 0, 1)
"""Stands for the segment of every row whose place is in `Cuts.offsets`."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Boundaries of shards in a file: shard k has the rows [k * rows_per_shard, (k + 1) * rows_per_shard) of all
    files."""

    file: int
    first_row: int
    """Rows in previous files."""
    rows_per_shard: int
    offsets: RowOffsets | None = None
    """Takes the place of every row, if rows are shuffled: then `rows_per_shard` is 1, and no segment is used."""

    def next_cut(self, index: int) -> int:
        """Return the first row of this file after row `index` at which a shard starts."""
        return index + self.rows_per_shard - (self.first_row + index) % self.rows_per_shard

    def segment(self, index: int, count: int, start: int = 0, stop: int = 0) -> RowRange:
        """Return the segment of `count` rows starting at this file's row `index`."""
        if self.offsets is not None:
            self.offsets.add(start, stop)
            return PLACED
        return RowRange(self.file, self.first_row + index, index, count, start, stop)

    def by_number(self, num_rows: int) -> tuple[RowRange, ...]:
        """Return all segments of a file in which rows are found by their number."""
        segments, index = [], 0
        if self.offsets is not None:
            return ()
        while index < num_rows:
            stop = min(self.next_cut(index), num_rows)
            segments.append(self.segment(index, stop - index))
            index = stop
        return tuple(segments)


def hash_texts(*texts: str) -> str:
    """Return the SHA-256 of strings."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()
