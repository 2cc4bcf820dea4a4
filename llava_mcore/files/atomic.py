"""Files and folders that survive a power failure: written, flushed to disk, then renamed to their final path."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from llava_mcore.errors import ConversionError
from llava_mcore.files.folder_lock import FolderLock
from llava_mcore.files.sizes import size_text


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


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, in the place of an earlier one if there is one; a reader sees either, and never a part."""
    partial = path.with_name(f".{path.name}.partial")
    write_synced(partial, data)
    move(partial, path)


def partial_sibling(target: Path) -> Path:
    """Return an empty folder next to `target` to write into; `publish` renames it."""
    partial = target.parent / f".{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)  # left by an interrupted run; nothing else uses this name
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, target: Path) -> None:
    """Rename a finished folder to its final path, so that a partial one is never taken for complete."""
    sync_tree(partial)
    if target.exists():
        target.rmdir()  # an empty folder: `require_absent` has been called
    os.rename(partial, target)
    sync(target.parent)


def locked(target: Path, *, activity: str) -> FolderLock:
    """Return the lock for writing to `target`: two writers would delete each other's files."""
    path = target.parent / f".{target.name}.lock"
    return FolderLock(
        path, activity=f"{activity} to {target}", advice="wait for it or stop it, or choose another folder"
    )


@contextlib.contextmanager
def written_beside(target: Path, *, num_bytes: int, activity: str) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes `target` at the end and is removed after an error.

    Args:
        num_bytes: bytes that will be written.
        activity: "the import", for messages.

    Raises:
        ConversionError: before anything is written, if the disk has not enough space or refuses the folder; or if
            writing failed.
        FolderInUse: another process is writing to the target.
    """
    require_room(target, num_bytes, activity=activity)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(target, activity=activity))
            partial = partial_sibling(target)
        except OSError as error:
            raise ConversionError(f"{activity} cannot be written to {target}: {error}") from error
        stack.enter_context(_published(partial, target, num_bytes, activity))
        yield partial


@contextlib.contextmanager
def _published(partial: Path, target: Path, num_bytes: int, activity: str) -> Iterator[None]:
    """Rename `partial` to `target` at the end; remove it after an error."""
    try:
        yield
        publish(partial, target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = f"; it needs {size_text(num_bytes)}, free some or choose another folder" if full else ""
        raise ConversionError(f"{activity} to {target} failed, and its files were removed: {error}{hint}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_room(target: Path, num_bytes: int, *, activity: str) -> None:
    """Refuse to start if the disk has not enough space.

    Raises:
        ConversionError: with the needed and the free space.
    """
    existing = next(p for p in (target.absolute(), *target.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        needed = f"{size_text(num_bytes)}, but {size_text(free)} are free"
        raise ConversionError(f"{target}: {activity} needs {needed} there; free some or choose another folder")


def require_absent(target: Path, *, activity: str) -> None:
    """Refuse to overwrite anything.

    Raises:
        ConversionError: `target` exists and is not an empty folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} exists and is not empty; {activity} never overwrites: choose another folder")
