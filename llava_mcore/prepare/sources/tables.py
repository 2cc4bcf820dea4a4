"""Tables of Arrow record batches -> rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from llava_mcore.errors import DataError
from llava_mcore.prepare.row_types import BadSample, RowRange, SourceRow
from llava_mcore.prepare.sources.base import BLOCK
from llava_mcore.prepare.sources.lines import too_large
from llava_mcore.prepare.sources.remote_file import RemoteFile

ROWS_AT_ONCE = 16
"""Rows to read from a table at a time; images make them large."""
# pyarrow's own errors derive from these.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, NotImplementedError, MemoryError)


def rows_of(
    path: Path | RemoteFile,
    batches: Iterator[pa.RecordBatch],
    segment: RowRange,
    skipped: int,
    most_bytes: int,
    unread: tuple[str, ...],
) -> Iterator[SourceRow]:
    """Yield the segment's rows from batches that start `skipped` rows before it. unread: columns left in the file."""
    left = segment.count
    for batch in guarded(path, batches):
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
        yield from map(_without_filling, batch.to_pylist())
        return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        too_many = row.nbytes > most_bytes
        yield too_large("a row", most_bytes) if too_many else _without_filling(row.to_pylist()[0])


def _without_filling(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose objects have only the fields that were written.

    A column has one type, so every object in it has the fields of all: a call of `weather(city)` also gets the
    arguments of `search`, as null.
    """
    return {key: _written(value) for key, value in row.items()}


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items() if item is not None}
    # Long lists, such as the samples of an audio clip, are of numbers.
    if isinstance(value, list) and isinstance(next((x for x in value if x is not None), None), (dict, list)):
        return [_written(item) for item in value]
    return value


def guarded[T](path: Path | RemoteFile, batches: Iterator[T]) -> Iterator[T]:
    """Report errors of reading as DataError."""
    try:
        yield from batches
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def ends_hash(path: Path | RemoteFile) -> str:
    """Return a hash of a file's size, head and tail, or of a remote file's version. The tail has Parquet's index."""
    if isinstance(path, RemoteFile):
        return path.fingerprint()
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        sha.update(file.read(BLOCK))
        file.seek(max(0, size - BLOCK))
        sha.update(file.read(BLOCK))
    return sha.hexdigest()
