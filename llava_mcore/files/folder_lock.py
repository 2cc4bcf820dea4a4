"""A lock on a folder that several machines share. One process holds it at a time and is named in the lock file.

The file is created exclusively, which network file systems support reliably. Some of them keep the kernel's locks
(flock) to one machine, and filelock's leases cannot be taken over on NFS. The drawback: the file may outlive its
holder. It is stale if its holder has ended or, if that cannot be known, if its modification time, which the holder
renews, is old by the file server's clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from llava_mcore.errors import LlavaMcoreError

SECONDS_BETWEEN_BEATS = 15.0
SECONDS_UNTIL_STALE = 90.0
"""Longer than an NFS client may take to notice a change made by another one."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_SETTLE = 0.5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")

JobHasEnded = Callable[[str], bool | None]
"""Returns whether a SLURM job has ended; None if that is unknown."""


class FolderInUse(LlavaMcoreError):
    """Another process holds the lock."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock.

    Attributes:
        machine: changes with every boot; a container with its own process ids counts as another machine.
        started: start time of the process in seconds since 1970: distinguishes it from a later one with the same id.
        since: when it acquired the lock.
        job: id of its SLURM job.
        restarts: how often that job has been requeued.
        group: the same for processes that may use the folder together.
        token: unique to this lock file.
    """

    host: str
    machine: str
    pid: int
    started: float
    since: str
    job: str | None
    restarts: int
    group: str
    token: str

    @classmethod
    def here(cls, group: str | None = None) -> Holder:
        """Return this process as a holder; without a group it does not share the folder."""
        token = secrets.token_hex(8)
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            job=os.environ.get("SLURM_JOB_ID"),
            restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            group=group or token,
            token=token,
        )

    def __str__(self) -> str:
        job = "" if self.job is None else f" of SLURM job {self.job}"
        return f"process {self.pid}{job} on {self.host}, since {self.since}"

    def has_ended(self, me: Holder, job_has_ended: JobHasEnded) -> bool | None:
        """Return whether the process has ended; None if that cannot be known from here."""
        if self.machine == me.machine:
            if not psutil.pid_exists(self.pid):
                return True
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(self.pid)
                return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started) > 2
            return False
        if self.job is None:
            return None
        if self.job == me.job:  # SLURM ends all processes of a job before it starts the job again
            return True if self.restarts < me.restarts else None
        return job_has_ended(self.job)


class FolderLock:
    """Holds a lock file while it is entered as a context."""

    def __init__(
        self,
        path: Path,
        *,
        activity: str,
        advice: str,
        group: str | None = None,
        say: Callable[[str], None] = lambda line: None,
        lost: Callable[[str], None] = lambda line: None,
        job_has_ended: JobHasEnded = lambda job: None,
    ) -> None:
        """The lock is acquired when the context is entered.

        Args:
            path: the lock file; it is created with its parent folders.
            activity: what is locked, for messages.
            advice: what to do if another process holds it, for messages.
            group: processes with the same group may use the folder together: one holds the lock, the others call
                `require_free`.
            say: called with a message when this process waits, or takes over a stale lock.
            lost: called in a thread when another process has taken the lock over.
        """
        self.path, self.activity, self.advice = path, activity, advice
        self._say, self._lost, self._job_has_ended = say, lost, job_has_ended
        self.me = Holder.here(group)
        self._released = threading.Event()
        self._seen: tuple[Holder | None, float] | None = None

    def __enter__(self) -> Self:
        """Acquire the lock; takes up to 90 s if it is unknown whether its holder has ended.

        Raises:
            FolderInUse: says who holds it.
            OSError: the folder cannot be written to.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._acquire()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()
        return self

    def _acquire(self) -> None:
        """Create the lock file. Raises as `__enter__` does."""
        while True:
            took_over = False
            while not _create(self.path, self.me):
                holder = _read(self.path)
                if holder == self.me:  # put back by a process that had judged an earlier file (see `_remove`)
                    return
                # One of our own group may be of the same run before it was started again.
                if self._is_stale(holder):
                    self._remove(holder)
                    took_over = True
            if not took_over:
                return
            # Another process may have judged the file earlier and removed it already.
            time.sleep(_SECONDS_TO_SETTLE)
            if _read(self.path) == self.me:
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        with contextlib.suppress(OSError):  # a deleted folder has no lock
            if _read(self.path) == self.me:
                self.path.unlink()

    def require_free(self) -> None:
        """Return once only processes of our group can hold the lock; it is not acquired.

        Raises:
            FolderInUse: says who holds it.
        """
        while self.path.exists():
            holder = _read(self.path)
            if (holder is not None and holder.group == self.me.group) or self._is_stale(holder):
                return

    def _is_stale(self, holder: Holder | None) -> bool:
        """Return whether the lock file is stale; wait a second if it has to be checked again.

        Args:
            holder: None if the file cannot be read, for example while it is written.

        Raises:
            FolderInUse: its holder is alive.
        """
        ended = None if holder is None else holder.has_ended(self.me, self._job_has_ended)
        changed = _changed(self.path)
        if changed is None:
            return False
        renewed = self._seen is not None and self._seen != (holder, changed)
        if ended is False or (ended is None and renewed and holder is not None):
            raise FolderInUse(f"{self.activity} is in use by {holder}; {self.advice}")
        age = _now(self.path.parent) - changed
        if ended or age >= SECONDS_UNTIL_STALE:
            self._say(f"{self.activity} was left by {holder or 'an unknown process'}, which has ended: taken over")
            return True
        if self._seen is None and holder is not None:
            self._say(
                f"{self.activity} is held by {holder}: waiting up to {SECONDS_UNTIL_STALE:.0f} s for a sign of life"
            )
        self._seen = (holder, changed)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        return False

    def _remove(self, judged: Holder | None) -> None:
        """Remove the lock file if it is still the one that was judged."""
        aside = self.path.with_name(f"{self.path.name}.{self.me.token}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            taken = _read(aside)
            if taken is not None and taken != judged:
                _create(self.path, taken)
            aside.unlink()

    def _beat(self) -> None:
        """Renew the modification time, and notice if another process has taken over."""
        misses = 0
        while not self._released.wait(SECONDS_BETWEEN_BEATS if misses == 0 else _SECONDS_BETWEEN_LOOKS):
            with contextlib.suppress(OSError):  # the file server is unavailable for a while
                holder = _read(self.path)
                if holder == self.me or (holder is None and _create(self.path, self.me)):
                    os.utime(self.path)
                    misses = 0
                    continue
                misses += 1
                if misses == 3:
                    self._lost(f"{self.activity} was taken over by {holder or 'an unknown process'}")
                    return


def _create(path: Path, holder: Holder) -> bool:
    """Write a lock file; return False if there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(holder)))
    return True


def _read(path: Path) -> Holder | None:
    """Return the holder of a lock file; None if it does not exist or cannot be read, for example while it is
    written."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _changed(path: Path) -> float | None:
    """Return the modification time of a file; opening it makes an NFS client ask the server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def _now(folder: Path) -> float:
    """Return the current time by the clock that stamps the files of a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _machine() -> str:
    """Return an identifier that is equal for processes that see each other's ids."""
    if not _BOOT_ID.is_file():
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
    return f"{_BOOT_ID.read_text().strip()} {_PID_NAMESPACE.stat().st_ino}"
