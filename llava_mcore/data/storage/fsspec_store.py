"""Stores that fsspec knows, for multi-storage-client: HDFS above all, which it has no provider for.

A profile names the protocol:

    storage_provider:
      type: fsspec
      options: {base_path: /data, protocol: webhdfs, host: namenode, port: 9870, user: me}
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import fsspec
from multistorageclient.providers.base import BaseStorageProvider
from multistorageclient.retry import retry
from multistorageclient.telemetry import Telemetry
from multistorageclient.types import ObjectMetadata, Range, RetryableError, RetryConfig, SymlinkHandling

NAME = "fsspec"
TIMES = ("mtime", "modificationTime", "modification_time", "LastModified", "last_modified", "created")
"""Keys under which file systems tell when a file was changed: a datetime, seconds, or (from 1e11 on) milliseconds."""
FIRST_MILLISECONDS = 1e11
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class FsspecStorageProvider(BaseStorageProvider):
    """Reads and writes files of any fsspec file system below a folder.

    multi-storage-client retries reads and writes as the profile's `retry` says. It does not retry questions (what is
    this file, what does this folder hold), so this class does, as often as multi-storage-client's default says. The
    file system is fsspec's own instance of the process and thread, so a forked process has its own connections.
    """

    def __init__(
        self,
        base_path: str,
        protocol: str,
        config_dict: dict[str, Any] | None = None,
        telemetry_provider: Callable[[], Telemetry] | None = None,
        **options: Any,
    ) -> None:
        """Take the options of a profile.

        Args:
            base_path: folder in the file system that paths of the profile begin at.
            protocol: fsspec's name of the file system: webhdfs, hdfs, ftp, ….
            options: arguments of the file system, such as host, port and user.
        """
        super().__init__(base_path.rstrip("/"), NAME, config_dict, telemetry_provider)
        self._protocol = protocol
        options.pop("credentials_provider", None)
        self._options = options
        self._retry_config = RetryConfig()  # the decorator `retry` reads it; a provider is not told its profile's own

    def _files(self) -> fsspec.AbstractFileSystem:
        return fsspec.filesystem(self._protocol, **self._options)

    def _try[T](self, operation: str, path: str, call: Callable[[], T]) -> T:
        """Return what a call returns, with the errors that multi-storage-client expects."""
        try:
            return call()
        except FileNotFoundError:
            raise
        except PERMANENT as error:
            raise RuntimeError(f"{operation} of {self._protocol}:{path} failed: {error!r}") from error
        except OSError as error:
            raise RetryableError(f"{operation} of {self._protocol}:{path} failed: {error!r}") from error
        except (ValueError, ImportError) as error:  # a wrong option, or a client that is not installed
            raise RuntimeError(f"{operation} of {self._protocol}:{path} failed: {error!r}") from error

    @retry
    def _ask[T](self, operation: str, path: str, call: Callable[[], T]) -> T:
        """Return what a call returns that only asks, trying again after a connection error."""
        return self._try(operation, path, call)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _get_object(self, path: str, byte_range: Range | None = None) -> bytes:
        start = None if byte_range is None else byte_range.offset
        end = None if byte_range is None else byte_range.offset + byte_range.size
        return bytes(self._try("reading", path, lambda: self._files().cat_file(path, start=start, end=end)))

    def _get_object_metadata(self, path: str, strict: bool = True) -> ObjectMetadata:
        return _metadata(path, self._ask("looking", path, lambda: self._files().info(path)))

    def _list_objects(
        self,
        path: str,
        start_after: str | None = None,
        end_at: str | None = None,
        include_directories: bool = False,
        symlink_handling: SymlinkHandling = SymlinkHandling.FOLLOW,
    ) -> Iterator[ObjectMetadata]:
        """Yield the files below a path in order, or its own entries if folders are wanted."""
        folder = path.rstrip("/")
        files = self._files()
        if include_directories:
            listed = self._ask("listing", folder, lambda: files.ls(folder, detail=True))
            listing = {str(info["name"]): info for info in listed}
        else:
            listing = self._ask("listing", folder, lambda: files.find(folder, detail=True))
        for name in sorted(listing):
            key = _absolute(name)
            if (start_after is None or key > start_after) and (end_at is None or key <= end_at):
                yield _metadata(key, listing[name])

    def _download_file(self, remote_path: str, f: str | IO[Any], metadata: ObjectMetadata | None = None) -> int:
        def download() -> int:
            with self._files().open(remote_path, "rb") as source:
                if isinstance(f, str):
                    os.makedirs(os.path.dirname(f) or ".", exist_ok=True)
                    partial = f"{f}.{os.getpid()}.part"
                    with open(partial, "wb") as target:
                        shutil.copyfileobj(source, target)
                    os.replace(partial, f)
                    return os.path.getsize(f)
                shutil.copyfileobj(source, f)
                return int(source.tell())

        return self._try("download", remote_path, download)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _put_object(
        self,
        path: str,
        body: bytes,
        if_match: str | None = None,
        if_none_match: str | None = None,
        attributes: dict[str, str] | None = None,
    ) -> int:
        return self._upload_file(path, BytesIO(body), attributes)

    def _upload_file(self, remote_path: str, f: str | IO[Any], attributes: dict[str, str] | None = None) -> int:
        def upload() -> int:
            files = self._files()
            files.makedirs(remote_path.rpartition("/")[0], exist_ok=True)
            data = Path(f).read_bytes() if isinstance(f, str) else f.read()
            with files.open(remote_path, "wb") as target:
                target.write(data)
            return len(data)

        return self._try("writing", remote_path, upload)

    def _copy_object(self, src_path: str, dest_path: str) -> int:
        return self._put_object(dest_path, self._get_object(src_path))

    def _delete_object(self, path: str, if_match: str | None = None) -> None:
        self._try("deleting", path, lambda: self._files().rm_file(path))

    def _make_symlink(self, path: str, target: str) -> None:
        raise NotImplementedError(f"{path}: fsspec has no links")


def _metadata(path: str, info: Mapping[str, Any]) -> ObjectMetadata:
    changed = next((info[key] for key in TIMES if info.get(key) is not None), 0)
    if isinstance(changed, (int, float)):
        changed = datetime.fromtimestamp(changed / 1000 if changed >= FIRST_MILLISECONDS else changed, UTC)
    is_folder = info["type"] == "directory"
    size = 0 if is_folder else int(info["size"])
    kind = "directory" if is_folder else "file"
    return ObjectMetadata(key=path, content_length=size, last_modified=changed, type=kind, etag=f"{size}-{changed}")


def _absolute(name: str) -> str:
    """Return a path as `_list_objects` was given it: some file systems leave out the first slash, some add a host."""
    return "/" + fsspec.core.strip_protocol(name).lstrip("/")
