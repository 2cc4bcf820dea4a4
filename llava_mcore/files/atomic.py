"""Files that are still there after the power has gone: written, flushed to the disk, then put in their place."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path, *, already: str = "") -> None:
    """Flush a folder with everything below it; files with the ending `already` have been flushed by their writers."""
    for here, _, names in os.walk(folder):
        for name in names:
            if not already or not name.endswith(already):
                sync(Path(here, name))
        sync(Path(here))


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it."""
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def move(source: Path, target: Path) -> None:
    """Rename within one folder, for good."""
    source.rename(target)
    sync(target.parent)
