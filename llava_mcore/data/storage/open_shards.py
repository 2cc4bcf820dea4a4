"""The open shards of a process: each is opened once for all streams and datasets, and their number is limited."""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict
from typing import BinaryIO

from megatron.energon.epathlib import EPath

from llava_mcore.data.storage.shard_files import MOST_INDEX, OFFSET
from llava_mcore.data.storage.tar_members import TarIndex
from llava_mcore.errors import DataError
from llava_mcore.files.regular import allowed_files, open_regular_file, read_regular_file

PART_FOR_SHARDS = 4
"""Shards use at most this fraction (1 / N) of the files that a process may open: sockets, pipes and libraries need the
others."""
FEWEST = 16
TOO_MANY = (errno.EMFILE, errno.ENFILE)


class OpenShard:
    """An open tar file with its index in memory."""

    def __init__(self, path: EPath) -> None:
        """Open it.

        Raises OSError if that fails, errors of the storage client for a remote one, and RefusedFileError if it is not a
        regular file.
        """
        index = path.with_suffix(".tar.idx")
        self._is_local = path.is_local()
        self._offsets = read_regular_file(index.local_path(), MOST_INDEX) if self._is_local else index.read_bytes()
        self._file = _opened(path, buffering=0)  # of thousands of open files, buffers would take much memory
        self.tar_index = TarIndex(lambda: _opened(path))

    def ends(self, index: int) -> tuple[int, int] | None:
        """Return the bytes [start, end) of a sample; None if the index does not contain it."""
        if not 0 <= index < len(self._offsets) // OFFSET.size - 1:
            return None
        start: int = OFFSET.unpack_from(self._offsets, index * OFFSET.size)[0]
        end: int = OFFSET.unpack_from(self._offsets, (index + 1) * OFFSET.size)[0]
        return (start, end) if start <= end else None

    def read(self, start: int, end: int) -> bytes | None:
        """Return the bytes [start, end); None if the file is too short."""
        if self._is_local:
            # Otherwise a wrong index could reserve gigabytes.
            if end > os.fstat(self._file.fileno()).st_size:
                return None
            block = _read_at(self._file.fileno(), start, end)
        else:
            self._file.seek(start)
            block = self._file.read(end - start)
        return block if len(block) == end - start else None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _opened(path: EPath, *, buffering: int = -1) -> BinaryIO:
    return open_regular_file(path.local_path(), buffering=buffering) if path.is_local() else path.open("rb")


def _read_at(descriptor: int, start: int, end: int) -> bytes:
    """Return the bytes [start, end) of a file, fewer at its end. One call of the system may return fewer, and never
    more than 2 GiB."""
    parts = []
    while start < end and (part := os.pread(descriptor, end - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class OpenShards:
    """The open shards, most recently used last."""

    def __init__(self) -> None:
        self._shards: OrderedDict[EPath, OpenShard] = OrderedDict()
        self._limit: int | None = None

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, path: EPath) -> OpenShard:
        """Return a shard, and open it if necessary. DataError if the process cannot open more files."""
        if path not in self._shards:
            if self._limit is None:
                self._limit = max(FEWEST, allowed_files() // PART_FOR_SHARDS)
            self._close_all_but(self._limit - 1)
            self._shards[path] = self._open(path)
        self._shards.move_to_end(path)
        return self._shards[path]

    def close(self, path: EPath) -> None:
        """Close a shard if it is open."""
        if path in self._shards:
            self._shards.pop(path).close()

    def close_all(self) -> None:
        """Close all shards: their paths may have other data when they are opened again."""
        self._close_all_but(0)

    def _open(self, path: EPath) -> OpenShard:
        try:
            return OpenShard(path)
        except OSError as error:
            if error.errno not in TOO_MANY:
                raise
        # Others use the rest of the limit: use fewer from now on.
        self._limit = max(FEWEST, len(self) // 2)
        self._close_all_but(self._limit - 1)
        try:
            return OpenShard(path)
        except OSError as error:
            if error.errno not in TOO_MANY:
                raise
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise DataError(
                f"{path} cannot be opened: {error.strerror}; this process may open {soft} files (at most {hard}); "
                "raise the limit with `ulimit -n` before the start, or lower data.num_streams"
            ) from error

    def _close_all_but(self, count: int) -> None:
        while len(self._shards) > count:
            self._shards.popitem(last=False)[1].close()


OPEN_SHARDS = OpenShards()
"""The open shards of this process."""
