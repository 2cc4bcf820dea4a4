"""Which checkpoints of a folder are complete, which of them to use, and which to delete.

A checkpoint is written under another name and renamed when all of it is on disk. Its run.json, which is written last,
lists every file with its size: a folder that lost files later, because of a full disk or an interrupted copy, is
detected without reading the weights.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llava_mcore.checkpoint.layout import ITERATION_NAME, TRACKER, iteration_folder, latest_iteration
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.regular import read_object

RUN_JSON = "run.json"
_LEFTOVER = re.compile(r"\.iter_\d{7,}\.(partial|deleted(\.\d+)?)")


@dataclass(frozen=True)
class Choice:
    """The newest complete checkpoint, and why newer ones are not used."""

    folder: Path
    iteration: int
    passed_over: tuple[str, ...]


def iterations(root: Path) -> list[int]:
    """Return the iterations that have a folder, complete or not, in ascending order."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := ITERATION_NAME.fullmatch(path.name)))


def newest_complete(
    root: Path, damaged: Mapping[Path, str] = MappingProxyType({}), *, instead: str = ""
) -> Choice | None:
    """Return the checkpoint to start from, or None without any checkpoint.

    That is the newest complete one up to the iteration in the tracker. A missing or unreadable tracker sets no
    limit.

    Args:
        damaged: checkpoints whose files are damaged, with their reasons; they count as incomplete.
        instead: what to do if none can be used; it ends the heading of the message.

    Raises:
        CheckpointError: there are checkpoints, but none of them can be used.
    """
    # The tracker, if it can be read, is the upper limit.
    passed_over: list[str] = []
    limit = None
    try:
        limit = latest_iteration(root)
    except CheckpointError as error:
        passed_over.append(str(error))
    complete = iterations(root)
    if limit is not None and limit not in complete:
        passed_over.append(f"{root / TRACKER} names iteration {limit}: {iteration_folder(root, limit)} is missing")
    # From the newest backwards, to the first complete one.
    for iteration in reversed(complete):
        folder = iteration_folder(root, iteration)
        problem = damaged.get(folder) or incomplete(folder)
        if limit is not None and iteration > limit:
            problem = f"newer than iteration {limit}, which {TRACKER} names"
        if problem is None:
            return Choice(folder, iteration, tuple(passed_over))
        passed_over.append(f"{folder}: {problem}")
    # There is none: an empty folder is a new run, anything else an error.
    if not passed_over:
        return None
    raise CheckpointError(problems(f"{root} has no complete checkpoint{instead}", passed_over))


def incomplete(folder: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, or None. Does not read weights."""
    if not (folder / "metadata.json").is_file():
        return "not a complete checkpoint, metadata.json is missing"
    if not (folder / RUN_JSON).is_file():
        return None  # imported, or written by an older version
    try:
        files: dict[str, int] = dict(read_object(folder / RUN_JSON, CheckpointError)["files"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        return f"{RUN_JSON} cannot be read: {error!r}"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return None


def write_run_json(folder: Path, content: dict[str, Any]) -> None:
    """Write run.json, the last file of a checkpoint: the given content, and every other file with its size.

    Raises:
        OSError: for example, the disk is full.
    """
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    (folder / RUN_JSON).write_text(json.dumps({**content, "files": files}, indent=1) + "\n", encoding="utf-8")


def outdated(root: Path, *, newest: int, keep_last: int | None, keep_every: int | None) -> list[Path]:
    """Return the checkpoints to delete; those newer than `newest` are kept.

    Args:
        keep_last: how many of the newest to keep; None keeps all.
        keep_every: multiples of this are kept forever.
    """
    if keep_last is None:
        return []
    old = [iteration for iteration in iterations(root) if iteration <= newest][:-keep_last]
    return [iteration_folder(root, i) for i in old if keep_every is None or i % keep_every]


def all_but(folder: Path) -> list[Path]:
    """Return all other checkpoints in the folder, including newer ones of an abandoned attempt."""
    beside = [iteration_folder(folder.parent, iteration) for iteration in iterations(folder.parent)]
    return [path for path in beside if path != folder]


def put_aside(folder: Path) -> Path:
    """Rename a checkpoint to a name that no longer looks like one, to be deleted later; return the new path."""
    name = folder.name.strip(".").partition(".")[0]
    names = (folder.with_name(f".{name}.deleted" + (f".{i}" if i else "")) for i in itertools.count())
    aside = next(path for path in names if not path.exists())  # deleting an earlier one may have failed
    folder.rename(aside)
    return aside


def discard(folder: Path) -> None:
    """Delete a checkpoint so that a kill halfway leaves nothing that looks like one."""
    delete(put_aside(folder))


def remove_leftovers(root: Path) -> None:
    """Delete what killed saves and deletions have left; what cannot be deleted is renamed and does not block a save."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            delete(put_aside(path) if path.name.endswith(".partial") else path)


logger = logging.getLogger(__name__)


def delete(folder: Path) -> None:
    """Delete a folder, or log why not: on NFS a file that is still open remains as .nfs…"""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", folder, error)


def delete_in_background(folders: Sequence[Path]) -> threading.Thread:
    """Delete folders in a thread that the process waits for before it ends, even in `exit_now`."""

    def work() -> None:
        for folder in folders:
            delete(folder)
        atexit.unregister(thread.join)

    thread = threading.Thread(target=work, name="deletion")
    atexit.register(thread.join)
    thread.start()
    return thread
