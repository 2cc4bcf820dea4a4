"""What may happen to a run, and how it has to end then."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from llava_mcore.checkpoint.complete import incomplete, iterations
from llava_mcore.checkpoint.layout import iteration_folder
from llava_mcore.checkpoint.node_local import LOCAL
from llava_mcore.config.schema import NON_PERSISTENT
from tests.e2e.chaos_run import Ended, Running, send
from tests.e2e.chaos_world import HANG_SECONDS, INTERVAL

FLIPPED_BYTES = 64
ROOM_LEFT = 1 << 18
"""Bytes that a full disk still has: for metrics, not for a checkpoint."""


@dataclass(frozen=True)
class Expected:
    """How a run ends. `after`: seconds until it may begin to. `orderly`: it takes the time that it needs, and only
    stragglers count."""

    codes: tuple[int, ...]
    last_line: str = ""
    after: float = 0.0
    orderly: bool = False


Act = Callable[[Running, random.Random], Expected]


@dataclass(frozen=True)
class Kind:
    """One thing that may happen. `aims`: at what moments; `weight`: how often, beside the others."""

    act: Act
    weight: int
    aims: tuple[str, ...] = ("start", "step", "save")
    flips: bool = False


def kill_all(running: Running, _rng: random.Random) -> Expected:
    for process in running.processes():
        send(process, signal.SIGKILL)
    return Expected((-signal.SIGKILL,))


def kill_rank(running: Running, rng: random.Random) -> Expected:
    rank, process = _some_rank(running, rng)
    send(process, signal.SIGKILL)
    return Expected((137,), rf"error: rank {rank} was ended by SIGKILL; all ranks were stopped")


def kill_loader(running: Running, rng: random.Random) -> Expected:
    send(rng.choice(running.loaders()), signal.SIGKILL)
    return Expected((2,), r"rank \d ended with exit code 2|a loader process was killed", orderly=True)


def kill_torchrun(running: Running, _rng: random.Random) -> Expected:
    process = running.torchrun()
    assert process is not None
    send(process, signal.SIGKILL)
    return Expected((137,), r"error: torchrun, .* was ended by SIGKILL")


def kill_launcher(running: Running, _rng: random.Random) -> Expected:
    running.process.kill()
    return Expected((-signal.SIGKILL,))


def stop_rank(running: Running, rng: random.Random) -> Expected:
    _, process = _some_rank(running, rng)
    send(process, signal.SIGSTOP)
    return Expected((124,), r"all ranks were stopped: rank \d ended with exit code 124", after=HANG_SECONDS)


def stop_loader(running: Running, rng: random.Random) -> Expected:
    send(rng.choice(running.loaders()), signal.SIGSTOP)
    return Expected((124,), r"all ranks were stopped: rank \d ended with exit code 124", after=HANG_SECONDS)


def ask_to_stop(running: Running, _rng: random.Random) -> Expected:
    running.process.send_signal(signal.SIGTERM)
    return Expected((75,), r"stopped early, after iteration \d+ of", orderly=True)


def interrupt(running: Running, _rng: random.Random) -> Expected:
    running.process.send_signal(signal.SIGINT)
    return Expected((130,), r"^interrupted$|^ended by SIGINT")


def fill_disk(running: Running, _rng: random.Random) -> Expected:
    """Fill the run's disk if it has one of its own; else let no file of a rank grow as large as a checkpoint's."""
    disk = running.folder.parent
    if os.path.ismount(disk):
        with ballast(disk).open("wb") as file:
            while shutil.disk_usage(disk).free > ROOM_LEFT:
                with contextlib.suppress(OSError):  # a save has taken some of the room meanwhile
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - ROOM_LEFT)
    else:
        for process in running.ranks().values():
            process.rlimit(resource.RLIMIT_FSIZE, (ROOM_LEFT, ROOM_LEFT))
    words = "disk full|No space left|File too large|all ranks were stopped: rank . ended with exit code 2"
    return Expected((2,), words, orderly=True)


KINDS: Mapping[str, Kind] = {
    "all killed": Kind(kill_all, 2),
    "rank killed": Kind(kill_rank, 3),
    "loader killed": Kind(kill_loader, 1, aims=("step", "save")),
    "torchrun killed": Kind(kill_torchrun, 1),
    "launcher killed": Kind(kill_launcher, 1),
    "rank stopped": Kind(stop_rank, 1, aims=("step", "save")),
    "loader stopped": Kind(stop_loader, 1, aims=("step", "save")),
    "SIGTERM": Kind(ask_to_stop, 1, aims=("step", "save")),
    "Ctrl-C": Kind(interrupt, 2),
    "bytes flipped": Kind(kill_all, 2, flips=True),
    "disk full": Kind(fill_disk, 1, aims=("step",)),
}


def wait_for_moment(running: Running, kind: str, aim: str, rng: random.Random, last: int) -> None:
    """Return at the instant at which it is to happen. Raises Ended if the run ended before.

    Args:
        last: iteration after which the run has too little left to do.
    """
    if aim == "start":
        needed = {"rank killed": running.ranks, "torchrun killed": running.torchrun, "Ctrl-C": running.torchrun}
        running.wait_until(lambda: bool(needed.get(kind, running.processes)()))
        time.sleep(rng.uniform(0, 10))
        if running.process.poll() is not None:
            raise Ended(running.process.returncode)
        return
    running.wait_until(lambda: "first iteration done" in running.text())
    reached = min(running.iteration() + rng.randrange(2 * INTERVAL), last)
    running.wait_until(lambda: running.iteration() >= reached)
    if aim == "save":
        running.wait_for_save()
    time.sleep(rng.uniform(0, 0.25))


def ballast(disk: Path) -> Path:
    """Return the file that fills a disk."""
    return disk / "ballast"


def flip_newest(folder: Path, rng: random.Random) -> tuple[Path, str] | None:
    """Flip bytes of some file of the newest checkpoint; return the checkpoint and the file, None if there is none."""
    found = [(i, root) for root in (folder, folder / NON_PERSISTENT) for i in iterations(root)]
    complete = [(i, root) for i, root in found if incomplete(iteration_folder(root, i)) is None]
    if not complete:
        return None
    newest = max(i for i, _ in complete)
    checkpoint = next(iteration_folder(root, i) for i, root in complete if i == newest)
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.stat().st_size]
    if (checkpoint / LOCAL).is_file():
        files += [Path(path) for path, _ in json.loads((checkpoint / LOCAL).read_text())["files"]]
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    begin = rng.randrange(max(1, len(content) - FLIPPED_BYTES))
    for i in range(begin, min(begin + FLIPPED_BYTES, len(content))):
        content[i] ^= 0xFF
    path.write_bytes(content)
    return checkpoint, path.name


def passed_over(text: str, checkpoint: Path, file: str) -> bool:
    """Tell whether a run has said that it does not use a checkpoint, of which a file was flipped."""
    told = text.partition("checkpoints that are not used")[2].partition("resumed at")[0]
    return str(checkpoint) in told or file in told


def _some_rank(running: Running, rng: random.Random) -> tuple[int, psutil.Process]:
    ranks = running.ranks()
    if not ranks:
        raise Ended(0)
    rank = rng.choice(sorted(ranks))
    return rank, ranks[rank]
