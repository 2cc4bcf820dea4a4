"""A file at a URL that is read where it is, by ranges of bytes, through fsspec."""

from __future__ import annotations

import hashlib
import io
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec

from llava_mcore.errors import DataError
from llava_mcore.prepare.sources.file_systems import file_system

FETCH_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError)
"""Errors of fsspec's file systems and of the libraries below them."""
CLIENT_ERRORS = {
    "aiohttp": ("ClientError",),
    "httpx": ("HTTPError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
}
"""Errors of HTTP clients that are none of these, by module."""
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that another attempt would not change."""
CHANGES = ("ETag", "etag", "blob_id", "checksum", "created", *("mtime", "modificationTime", "LastModified"))
"""Keys under which file systems say which version of a file there is."""
ATTEMPTS, FIRST_WAIT = 4, 1.0
"""How often a range is asked for, and the seconds before the second attempt; each wait is twice the one before."""
REMOTE_BLOCK = 1 << 23
"""Bytes to ask for at a time: a request takes as long as some megabytes."""
TAIL = 1 << 16


def fetch_errors() -> tuple[type[BaseException], ...]:
    """Return the errors of reading from a URL, with those of the clients that are imported by now."""
    loaded = [(sys.modules[module], names) for module, names in CLIENT_ERRORS.items() if module in sys.modules]
    return (*FETCH_ERRORS, *(vars(module)[name] for module, names in loaded for name in names))


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of any file system that fsspec knows. Small, and sent to every process."""

    url: str
    size: int
    version: tuple[str, ...]
    """Details by which the file system tells a changed file, from when it was listed."""

    def __str__(self) -> str:
        return self.url

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file for reading in blocks."""
        assert mode == "rb"
        return io.BufferedReader(RemoteRanges(self), REMOTE_BLOCK)

    def fingerprint(self) -> str:
        """Return a hash of the file's version; of its size and end, which has Parquet's index, if it has none."""
        sha = hashlib.sha256(" ".join(self.version).encode())
        if len(self.version) < 2:
            ranges = RemoteRanges(self)
            ranges.seek(max(0, self.size - TAIL))
            sha.update(ranges.read(TAIL))
        return sha.hexdigest()

    def require_unchanged(self) -> None:
        """Raise DataError if the file is another one than when it was listed."""
        try:
            files, path = file_system(self.url)
            files.invalidate_cache()
            version = version_of(files.info(path))
        except fetch_errors() as error:
            raise DataError(f"{self} cannot be read: {error}") from error
        if version != self.version:
            raise DataError(f"{self} has changed while it was read; run the same command with --overwrite")


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """Files of a URL that are read where they are, with their names for users."""

    url: str
    files: tuple[tuple[str, RemoteFile], ...]


def version_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a file system says of a file's version: its size, then all that it has."""
    return (str(info.get("size")), *(f"{key} {info[key]}" for key in CHANGES if info.get(key) is not None))


def list_files(files: fsspec.AbstractFileSystem, root: str) -> tuple[dict[str, Mapping[str, Any]], bool]:
    """Return what a file system says of the files, by their names below the root, and whether the root is a file.

    Hidden files are left out. A web page is a folder of what it links to. (`isfile` would download a file of the web.)
    """
    info = files.info(root)
    if info["type"] != "directory" and info.get("mimetype") != "text/html":
        return {PurePosixPath(root).name: info}, True
    listed = {str(PurePosixPath(name).relative_to(root)): info for name, info in files.find(root, detail=True).items()}
    hidden = {name for name in listed if any(part.startswith(".") for part in name.split("/"))}  # also `..`
    return {name: info for name, info in sorted(listed.items()) if name not in hidden}, False


class RemoteRanges(io.RawIOBase):
    """The bytes of a remote file. A range that cannot be read is asked for again, and then is a DataError."""

    def __init__(self, remote: RemoteFile) -> None:
        super().__init__()
        self._remote = remote
        self._position = 0
        self._handle: Any = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position; nothing is read."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._remote.size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and fill it unless the file ends."""
        count = min(len(buffer), self._remote.size - self._position)
        if count <= 0:
            return 0
        buffer[:count] = self._range(count)
        self._position += count
        return count

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        super().close()

    def _range(self, count: int) -> bytes:
        error: BaseException = EOFError()
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                return self._once(count)
            except fetch_errors() as reason:
                error = reason
                self._drop()
                if isinstance(reason, FINAL):
                    break
        raise DataError(
            f"{self._remote} cannot be read from byte {self._position:,} on: {type(error).__name__}: {error}; run the "
            "same command again, which keeps finished shards"
        ) from error

    def _once(self, count: int) -> bytes:
        if self._handle is None:
            files, path = file_system(self._remote.url)
            self._handle = files.open(path, "rb", cache_type="none")
        self._handle.seek(self._position)
        data = bytes(self._handle.read(count))
        if len(data) != count:
            raise OSError(f"only {len(data):,} of {count:,} bytes came")
        return data

    def _drop(self) -> None:
        if self._handle is not None:
            self._handle.close()
        self._handle = None
