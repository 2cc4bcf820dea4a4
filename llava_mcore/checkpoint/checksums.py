"""Checksums of a checkpoint's files: made when they are written, compared before they are read.

xxh3_64 finds what disks, networks and memory do to files; it is no protection against somebody who changes them on
purpose. It is about ten times as fast as SHA-256, and Python's threads run beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from llava_mcore.checkpoint.complete import RUN_JSON
from llava_mcore.errors import CheckpointError
from llava_mcore.files.json_files import read_object
from llava_mcore.files.regular import require_regular

FILE = "checksums.json"
"""Where an import keeps them; a run's checkpoint has them in run.json."""
KEY = "checksums"
ALGORITHM = "xxh3_64"
THREADS = 4
"""Files that one process reads at a time: fast disks and network file systems want more than one reader."""
_BLOCK = 4 << 20


class Checksum:
    """One checksum, made of bytes as they come."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes; other threads run meanwhile."""
        self._digest.update(data)

    def text(self) -> str:
        """Return it as 16 hexadecimal digits."""
        return self._digest.hexdigest()


def of_bytes(data: bytes) -> str:
    """Return the checksum of some bytes."""
    return xxhash.xxh3_64(data).hexdigest()


def of_file(path: Path) -> str:
    """Return the checksum of a file.

    Raises:
        OSError: it cannot be read.
        CheckpointError: it is no regular file.
    """
    require_regular(path)
    checksum, buffer = Checksum(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(buffer[:count])
    return checksum.text()


def of_files(paths: Sequence[Path]) -> dict[str, str]:
    """Return the checksums of files in one folder, by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip((path.name for path in paths), pool.map(of_file, paths), strict=True))


def of_folder(folder: Path, known: Mapping[str, str]) -> dict[str, Any]:
    """Return what is recorded about a folder: the checksum of every file in it and below.

    Args:
        known: those that have been made already, by path relative to the folder.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE)
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    return {"algorithm": ALGORITHM, "files": {name: known.get(name) or of_file(path) for name, path in files.items()}}


def write_checksums(folder: Path, known: Mapping[str, str]) -> None:
    """Write the checksums of a folder that has no run.json, as its last file."""
    (folder / FILE).write_text(json.dumps(of_folder(folder, known), indent=1) + "\n", encoding="utf-8")


def recorded(folder: Path) -> dict[str, str] | None:
    """Return the checksum of every file as it was written; None for a checkpoint without: older, or of others.

    Raises:
        CheckpointError: the record cannot be read, is of another algorithm, or names files outside of the folder.
    """
    path = folder / RUN_JSON
    content = read_object(path, CheckpointError).get(KEY) if path.is_file() else None
    if content is None and (folder / FILE).is_file():
        path = folder / FILE
        content = read_object(path, CheckpointError)
    if content is None:
        return None
    try:
        algorithm, files = content["algorithm"], {str(name): str(text) for name, text in content["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no list of checksums ({error!r})") from error
    if algorithm != ALGORITHM:
        raise CheckpointError(f"{path}: checksums of {algorithm!r}, this version makes {ALGORITHM!r}")
    outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside:
        raise CheckpointError(f"{path} names files outside of the folder: {outside[:3]}")
    return files


def damaged_files(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Read files and return a line about each that is not what was written.

    Args:
        expected: checksums, by path relative to the folder.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        lines = pool.map(lambda item: damage(folder / item[0], item[0], item[1]), expected.items())
        return [line for line in lines if line is not None]


def damage(path: Path, name: str, expected: str) -> str | None:
    """Read a file and return what is wrong with it, None if nothing is. `name`: what it is called in the message."""
    try:
        found = of_file(path)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return str(error)
    return None if found == expected else f"{name} is damaged: {ALGORITHM} {found}, {expected} was written"


def by_size(folder: Path, names: Iterable[str]) -> list[str]:
    """Return files in falling order of size, so that they can be dealt out evenly."""
    sizes = {}
    for name in names:
        try:
            sizes[name] = os.stat(folder / name).st_size
        except OSError:
            sizes[name] = 0  # whoever reads it says so
    return sorted(sizes, key=lambda name: (-sizes[name], name))
