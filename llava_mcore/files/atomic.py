"""Files that survive a power failure: written, flushed to disk, then renamed to their final path."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or a folder's directory entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path, *, already: str = "") -> None:
    """Flush a folder with everything below it, except files with the suffix `already`, which their writers have
    flushed."""
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
    """Rename within one folder and flush the folder."""
    source.rename(target)
    sync(target.parent)
