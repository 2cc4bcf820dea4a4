"""Checksums of a checkpoint's files: computed when they are written, compared before they are read.

xxh3_64 detects damage by disks, networks and memory; it does not protect against deliberate changes. It is about ten
times as fast as SHA-256, and releases the interpreter lock.
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
from llava_mcore.files.regular import read_object, require_regular

FILE = "checksums.json"
"""File of an import with its checksums; a run's checkpoint has them in run.json."""
KEY = "checksums"
ALGORITHM = "xxh3_64"
THREADS = 4
"""Files that one process reads in parallel: fast disks and network file systems need more than one reader."""
_BLOCK = 4 << 20


class Checksum:
    """One checksum, updated with bytes as they arrive."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes; other threads can run meanwhile."""
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
        CheckpointError: it is not a regular file.
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
    """Return the record of a folder: the checksum of every file in it and below.

    Args:
        known: checksums that have been computed already, by path relative to the folder. They are recorded even if a
            file is not listed, which happens on network file systems that update late: a reader then notices a missing
            file, which would otherwise go unnoticed.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE)
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    computed = {name: of_file(path) for name, path in files.items() if name not in known}
    return {"algorithm": ALGORITHM, "files": dict(sorted({**known, **computed}.items()))}


def write_checksums(folder: Path, known: Mapping[str, str]) -> None:
    """Write the checksums of a folder without run.json, as its last file."""
    (folder / FILE).write_text(json.dumps(of_folder(folder, known), indent=1) + "\n", encoding="utf-8")


def recorded(folder: Path) -> dict[str, str] | None:
    """Return the recorded checksum of every file; None for a checkpoint without them (an older one, or of another
    program).

    Raises:
        CheckpointError: the record cannot be read, uses another algorithm, or names files outside of the folder.
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
        raise CheckpointError(f"{path}: not a list of checksums ({error!r})") from error
    if algorithm != ALGORITHM:
        raise CheckpointError(f"{path}: checksums of {algorithm!r}; this version uses {ALGORITHM!r}")
    outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside:
        raise CheckpointError(f"{path} names files outside of the folder: {outside[:3]}")
    return files


def damaged_files(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Read files and return a line about each that differs from its checksum.

    Args:
        expected: checksums, by path relative to the folder.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        lines = pool.map(lambda item: damage(folder / item[0], item[0], item[1]), expected.items())
        return [line for line in lines if line is not None]


def damage(path: Path, name: str, expected: str) -> str | None:
    """Read a file and return what is wrong with it, or None. `name`: its name in the message."""
    try:
        actual = of_file(path)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return str(error)
    return None if actual == expected else f"{name} is damaged: {ALGORITHM} {actual}, {expected} was written"


def by_size(folder: Path, names: Iterable[str]) -> list[str]:
    """Return files in descending order of size, so that they can be distributed evenly."""
    sizes = {}
    for name in names:
        try:
            sizes[name] = os.stat(folder / name).st_size
        except OSError:
            sizes[name] = 0  # whoever reads it reports that
    return sorted(sizes, key=lambda name: (-sizes[name], name))
