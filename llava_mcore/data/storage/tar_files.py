"""Tar files: their members, also other than plain files, and the shards that this process has open.

GNU tar writes a file as a hard link when an earlier member has the same inode, so a hard link has the contents
of that member. Nothing else is followed: a symbolic link or a device has no contents in the file.
"""

from __future__ import annotations

import errno
import os
import resource
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

from megatron.energon.epathlib import EPath

from llava_mcore.data.storage.shard_files import MOST_INDEX, OFFSET
from llava_mcore.data.storage.stored_tokens import StoredTokens, open_tokens, warn_of_damage
from llava_mcore.errors import DataError
from llava_mcore.files.regular import allowed_files, open_regular_file, read_regular_file

LINKS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
}
"""Members without their own contents; folders are not listed, because they are not part of a sample."""


@dataclass(frozen=True, slots=True)
class NoContents:
    """Replaces a part of a sample that has no contents."""

    reason: str


@dataclass(frozen=True, slots=True)
class Link:
    """A member that refers to another one."""

    kind: bytes
    target: str
    offset: int
    """Offset of its header in the file."""


def open_tar(file: BinaryIO) -> tarfile.TarFile:
    """Open a tar at a file's current position. Raises tarfile.TarError, or ValueError for invalid headers."""
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except RecursionError as error:
        raise ValueError("too many headers for one member") from error


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members from the current position on, and forget those that were read.

    Raises ValueError for invalid headers, such as negative sizes, with which reading would never end.
    """
    try:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # else the headers of the whole file pile up
            if member.size < 0 or tar.offset <= member.offset:
                raise ValueError(f"the member {member.name!r} has {member.size} bytes")
            yield member
    except RecursionError as error:
        raise ValueError("too many headers for one member") from error


def read_block(block: bytes, start: int, most_bytes: int) -> list[tuple[str, bytes | Link | NoContents]]:
    """Return names and contents of a part of a tar file, without folders.

    Args:
        block: whole members; start: its offset in the file.
        most_bytes: maximum size of a member; a sparse file may claim any size.

    Raises:
        ValueError, tarfile.TarError: the block is not valid.
    """
    entries: list[tuple[str, bytes | Link | NoContents]] = []
    with closing(open_tar(BytesIO(block))) as tar:
        for member in members(tar):
            if member.type in LINKS:
                entries.append((member.name, Link(member.type, member.linkname, start + member.offset)))
            elif member.isfile() and member.size > most_bytes:
                entries.append((member.name, NoContents(f"it has {member.size} bytes; the limit is {most_bytes}")))
            elif member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                content = file.read()
                if len(content) != member.size:
                    raise ValueError(f"the file ends within {member.name!r}")
                entries.append((member.name, content))
        if tar.offset < len(block):  # tarfile treats a damaged header as the end
            raise ValueError(f"there is no header at byte {start + tar.offset}")
    return entries


class TarIndex:
    """Offsets of the files in a tar. It is read once, at the first hard link."""

    def __init__(self, opened: Callable[[], BinaryIO]) -> None:
        """opened: opens the tar file at its start."""
        self._opened = opened
        self._files: dict[str, list[tuple[int, int, int]]] | None = None

    def contents(self, link: Link, most_bytes: int) -> bytes | NoContents:
        """Return the contents that a link refers to. OSError if the file cannot be read."""
        if link.kind != tarfile.LNKTYPE:
            return NoContents(f"it is {LINKS[link.kind]}, which has no contents in the shard")
        if self._files is None:
            self._files = self._read()
        before = [where for where in self._files.get(link.target, ()) if where[0] < link.offset]
        if not before:
            return NoContents(f"it is a hard link to {link.target!r}, which is not an earlier file in the same shard")
        _, start, size = before[-1]
        if size > most_bytes:
            return NoContents(f"it has {size} bytes; the limit is {most_bytes}")
        with self._opened() as file:
            file.seek(start)
            return file.read(size)

    def _read(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return header, first byte and size of all files by their names, up to the first invalid header."""
        positions: dict[str, list[tuple[int, int, int]]] = {}
        with self._opened() as file:
            try:
                with closing(open_tar(file)) as tar:
                    for member in members(tar):
                        if member.isreg() and not member.issparse():
                            positions.setdefault(member.name, []).append(
                                (member.offset, member.offset_data, member.size)
                            )
                        elif member.islnk() and member.linkname in positions:  # a link to a link
                            _, start, size = positions[member.linkname][-1]
                            positions.setdefault(member.name, []).append((member.offset, start, size))
            except (ValueError, tarfile.TarError):
                pass
        return positions


PART_FOR_SHARDS = 4
"""At most this fraction (1 / N) of the files that a process may open are shards, and as many the files of their tokens:
sockets, pipes and libraries need the others."""
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
        self._path = path
        try:
            self._tokens = open_tokens(path.local_path()) if self._is_local else None
        except OSError:
            self._file.close()
            raise

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

    def stored(self, index: int, fingerprint: str) -> StoredTokens | None:
        """Return the tokens that are stored beside the shard for a sample; None without any by this fingerprint."""
        if self._tokens is None or self._tokens.fingerprint != fingerprint:
            return None
        try:
            return self._tokens.entry(index)
        except (OSError, ValueError) as error:
            warn_of_damage(self._path.local_path(), error)
            return None

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tokens is not None:
            self._tokens.close()


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
