"""Reads files of untrusted paths: only regular files of a bounded size, as bytes, text or JSON objects.

Every error has the file's name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llava_mcore.errors import CheckpointError, DataError, FileError, LlavaMcoreError

_LONGEST_NAME = 255  # bytes, on Linux file systems


class RefusedFileError(DataError):
    """A path that is not a regular file, or a file that is too large."""


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a regular file.

    Reading a named pipe would block forever, and a device such as /dev/zero has no end.

    Raises:
        OSError: it does not exist or cannot be read to its end.
        ValueError: the name is not a valid file name.
        RefusedFileError: it is not a regular file, or larger than most_bytes.
    """
    with open_regular_file(path, most_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        # Without a limit: read(most_bytes) would reserve that much memory, and could end early without an error.
        data = file.read()
    if len(data) > most_bytes:
        raise RefusedFileError(f"{path} has grown to {len(data)} bytes; the limit is {most_bytes}")
    if len(data) < size:
        raise OSError(errno.EIO, f"only {len(data)} of {size} bytes could be read", str(path))
    return data


def open_regular_file(path: Path, most_bytes: int | None = None, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises like `read_regular_file`.

    Args:
        most_bytes: None allows any size.
        buffering: as for `open`. With 0, `read` may return fewer bytes than there are.
    """
    # Checked before and after opening: opening a device may have effects, and the path may have changed in between.
    _check(path, os.stat(path), most_bytes)
    file: BinaryIO = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering)
    try:
        _check(path, os.fstat(file.fileno()), most_bytes)
    except RefusedFileError:
        file.close()
        raise
    return file


def _check(path: Path, status: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFileError(f"{path} is {kind_of(status.st_mode)}, not a regular file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise RefusedFileError(f"{path} has {status.st_size} bytes; the limit is {most_bytes}")


def kind_of(mode: int) -> str:
    """Return the kind of file that a mode describes."""
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a named pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "something else")


def read_regular(path: Path, most_bytes: int, kind: type[LlavaMcoreError] = CheckpointError) -> bytes:
    """Return a file's bytes.

    Args:
        most_bytes: maximum size in bytes.
        kind: the error to raise.

    Raises:
        LlavaMcoreError: it does not exist, is not a regular file (reading a pipe would block) or is too large.
    """
    try:
        size = require_regular(path, kind).st_size
        if size > most_bytes:
            raise kind(f"{path}: {size:,} bytes; the limit is {most_bytes:,}")
        return path.read_bytes()
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}") from error


def require_regular(path: Path, kind: type[LlavaMcoreError] = CheckpointError) -> os.stat_result:
    """Return a file's status, following links.

    Raises:
        OSError: the file does not exist.
        LlavaMcoreError: a folder, a pipe or a device.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise kind(f"{path}: not a regular file")
    return status


def plain_name(name: object) -> bool:
    """Return whether this is a plain file name without a path."""
    is_text = isinstance(name, str) and name not in ("", ".", "..") and len(name.encode()) <= _LONGEST_NAME
    return is_text and not {"/", "\\", "\0"} & set(str(name))


MOST_FILES = 65536
"""Number of open files that a process requests from the system."""


def allowed_files() -> int:
    """Raise this process's limit of open files to the hard limit or the requested number, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to OSErrors of reads and writes, as `open` does."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def read_text(path: Path) -> str:
    """Return the text of a file. Raises FileError if it is not UTF-8, OSError if it cannot be read."""
    try:
        with naming(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


MAX_JSON = 512 << 20
"""Maximum size of a JSON file in bytes; the largest tokenizers and indexes have a tenth of that."""
_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def read_object(path: Path, kind: type[LlavaMcoreError] = FileError) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        kind: the error to raise.

    Raises:
        LlavaMcoreError: the file does not exist, is not a regular file, is too large or too deeply nested, or is not a
            JSON object.
    """
    return parse_object(read_regular(path, MAX_JSON, kind), str(path), kind)


def parse_object(text: str | bytes, where: str, kind: type[LlavaMcoreError] = FileError) -> dict[str, Any]:
    """Parse a JSON object. Raises `kind` with a message that starts with `where` for anything else."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise kind(f"{where}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise kind(f"{where}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise kind(f"{where}: expected a JSON object, found {_KINDS.get(type(content), 'a number')}")
    return content
