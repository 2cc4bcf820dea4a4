"""Errors that a user can cause. Each message says where, what was found, what is allowed and what to do."""

from __future__ import annotations

import errno
import shutil
import traceback
from collections.abc import Iterable
from pathlib import Path

HUNG = 124
"""Exit code of a process that hung and was ended by its watchdog; the same as that of timeout(1)."""


class LlavaMcoreError(Exception):
    """Base of all errors that are reported as one message, without a traceback.

    `on_all_ranks`: every rank raises the same message, so one of them may report it for all.
    `exit_code`: the exit code of a process that ends with this error.
    """

    exit_code = 2

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class ConfigError(LlavaMcoreError):
    """The run's configuration, a flag or a layout cannot work."""


class ConversionError(LlavaMcoreError):
    """A Hugging Face folder, the mapping table and the model do not agree."""


class DataError(LlavaMcoreError):
    """A dataset, a sample, a tokenizer or an image processor cannot be used."""


class CheckpointError(LlavaMcoreError):
    """A Megatron checkpoint cannot be read, written or resumed from."""


class FileError(LlavaMcoreError):
    """A file or folder cannot be read or written, or has unexpected contents."""


class TrainingError(LlavaMcoreError):
    """Training itself failed: values are not finite, or a GPU ran out of memory."""

    exit_code = 3


def problems(title: str, entries: Iterable[str]) -> str:
    """Return one message that lists every problem on an indented line."""
    lines = [f"  - {line}".replace("\n", "\n    ") for line in entries]
    return "\n".join([f"{title} ({len(lines)} problem{'s' if len(lines) != 1 else ''}):", *lines])


_REMEDIES = {
    errno.ENOSPC: "free some space there, or choose another folder",
    errno.EDQUOT: "your quota is used up: free some space there, or choose another folder",
    errno.EROFS: "choose a writable folder",
    errno.EACCES: "change its permissions, or choose another folder",
    errno.EPERM: "change its permissions, or choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "a folder with this name exists",
    errno.EEXIST: "something with this name exists: move it, or choose another name",
    errno.ENOENT: "it does not exist, or has been deleted",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.EIO: "the disk or the network file system failed",
    errno.ESTALE: "it has been replaced on the file server",
}


def os_error_text(error: OSError) -> str:
    """Return "where: what; what to do" for an error of the operating system.

    For an error without a file name, "where" is the line of this package that raised it.
    """
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        source, target, reason = error.args[0][0]  # the first of the files that could not be copied
        return f"{target}: could not be copied from {source}: {reason.splitlines()[0]}"
    if error.errno is None or error.strerror is None:  # a library's own message
        return str(error) or type(error).__name__
    paths = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = " -> ".join(paths) or _line_of_ours(error)
    remedy = _REMEDIES.get(error.errno)
    return f"{where}: {error.strerror}" + ("" if remedy is None else f"; {remedy}")


def _line_of_ours(error: OSError) -> str:
    package = Path(__file__).parent
    frames = [x for x in traceback.extract_tb(error.__traceback__) if Path(x.filename).is_relative_to(package)]
    line = f" (llava_mcore/{Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno})" if frames else ""
    return f"standard output or a file{line}"


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article: "an image", "a video"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def counted(count: int, noun: str) -> str:
    """Return a number of things, as "1 row" or "2,000 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
