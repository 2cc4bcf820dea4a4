"""Members of a tar file other than plain files: long names, sparse files, links and devices.

GNU tar writes a file as a hard link when an earlier member has the same inode, so a hard link has the contents
of that member. Nothing else is followed: a symbolic link or a device has no contents in the file.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

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
