"""Files of untrusted paths: read to their end or not at all, without reserving what their limit allows."""

from __future__ import annotations

import errno
import io
import os
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from llava_mcore.data.storage.tar_files import _read_at
from llava_mcore.files.regular import RefusedFileError, read_regular_file


class Failing(io.RawIOBase):
    """A file on a disk or network that fails after a few bytes, or ends there."""

    def __init__(self, file: BinaryIO, error: int | None) -> None:
        self._file, self._error, self._reads = file, error, 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int:
        self._reads += 1
        if self._reads > 1 and self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        return self._file.readinto(memoryview(buffer)[:10]) if self._reads == 1 else 0


@pytest.mark.parametrize(("error", "message"), [(errno.EIO, "Input/output error"), (None, "only 10 of 20 bytes")])
def test_a_file_that_cannot_be_read_to_its_end_is_an_error(
    error: int | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(20))
    opened = os.fdopen

    def failing(descriptor: int, mode: str, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(Failing(opened(descriptor, mode), error))  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fdopen", failing)
    with pytest.raises(OSError, match=message):
        read_regular_file(tmp_path / "file", 100)


def test_no_more_memory_is_reserved_than_a_file_has(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8000))
    tracemalloc.start()
    try:
        assert read_regular_file(tmp_path / "file", 1 << 32) == bytes(8000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(RefusedFileError, match="has 8000 bytes; the limit is 7999"):
        read_regular_file(tmp_path / "file", 7999)


def test_a_shard_is_read_although_the_system_returns_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: whole(file, min(size, 7), start))
    with (tmp_path / "file").open("rb") as file:
        assert _read_at(file.fileno(), 30, 130) == bytes(range(30, 130))
        assert _read_at(file.fileno(), 190, 230) == bytes(range(190, 200))
