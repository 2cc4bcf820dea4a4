"""A training command that something is going to happen to, and all processes that it starts."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.e2e.chaos_world import COMMAND_TIMEOUT, ENVIRONMENT
from tests.helpers.commands import ROOT, command, read_metrics

PARTIAL = ".iter_*.partial"
MARK = "CHAOS_RUN"
"""Every process of a run has it in its environment, also one whose parent is gone."""


class Ended(Exception):
    """The run ended before something could happen to it."""


class Running:
    """A started command; left as a context, nothing of it is left."""

    def __init__(
        self, output: Path, folder: Path, flags: list[object], environment: Mapping[str, str] = ENVIRONMENT
    ) -> None:
        """folder: SAVE_DIR/NAME. environment: variables beside those of this process."""
        self.folder, self._output = folder, output
        self._known: dict[int, psutil.Process] = {}
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command("train/run.py", *flags),
                **{"stdout": file, "stderr": file, "cwd": ROOT},
                env=os.environ | environment | {name: value},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while found := self.processes():
            for process in found:
                process.kill()
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()

    def text(self) -> str:
        """Return what it has printed."""
        return self._output.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run that are there, also those that are about to end."""
        mark = self._mark.encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in self._known:
                with contextlib.suppress(OSError, psutil.NoSuchProcess):
                    if mark in (entry / "environ").read_bytes():
                        self._known[int(entry.name)] = psutil.Process(int(entry.name))
        return [process for process in self._known.values() if is_there(process)]

    def torchrun(self) -> psutil.Process | None:
        """Return the process that watches over the ranks, if it has begun."""
        return next((x for x in self.processes() if "llava_mcore.launch.torchrun" in arguments(x)), None)

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the training processes by rank."""
        torchrun = self.torchrun()
        workers = [] if torchrun is None else [x for x in self.processes() if parent_of(x) == torchrun.pid]
        return {rank: x for x in workers if (rank := rank_of(x)) is not None}

    def loaders(self) -> list[psutil.Process]:
        """Return the loader processes."""
        ranks = {x.pid for x in self.ranks().values()}
        return [x for x in self.processes() if parent_of(x) in ranks and "llava_mcore.launch.worker" in arguments(x)]

    def ports(self) -> list[int]:
        """Return the ports that its processes listen on."""
        found = set()
        for process in self.processes():
            try:
                found |= {x.laddr.port for x in process.net_connections("tcp") if x.status == psutil.CONN_LISTEN}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return sorted(found)

    def iteration(self) -> int:
        """Return the last iteration that it has noted."""
        return max((line["iteration"] for line in read_metrics(self.folder)), default=0)

    def wait_until(self, condition: Callable[[], bool], seconds_between_looks: float = 0.02) -> None:
        """Wait. Raises Ended if the run ends before, AssertionError if it takes too long."""
        end = time.monotonic() + COMMAND_TIMEOUT
        while not condition():
            if self.process.poll() is not None:
                raise Ended(self.process.returncode)
            assert time.monotonic() < end, self.text()[-3000:]
            time.sleep(seconds_between_looks)

    def wait_for_save(self) -> None:
        """Wait until a checkpoint is half written."""
        self.wait_until(lambda: any(self.folder.rglob(PARTIAL)), 0.002)

    def wait_for_end(self, seconds: float) -> float:
        """Wait until no process is left, or the time is over; return the seconds."""
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if self.process.poll() is not None and not self.processes():
                break
            time.sleep(0.02)
        return time.monotonic() - begin

    def resumed_at(self) -> tuple[int, str] | None:
        """Return iteration and folder of the checkpoint that it went on from."""
        found = re.search(r"resumed at iteration (\d+) of (\S+)", self.text())
        return None if found is None else (int(found[1]), found[2])


def is_there(process: psutil.Process) -> bool:
    """Tell whether a process has not ended. One that waits for its parent to notice has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def arguments(process: psutil.Process) -> list[str]:
    """Return a process's command line, empty if it is gone."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def parent_of(process: psutil.Process) -> int:
    """Return the parent's id, 0 if the process is gone."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a process that torchrun started."""
    try:
        return int(process.environ().get("RANK", "")) if "llava_mcore.launch.worker" in process.cmdline() else None
    except (psutil.NoSuchProcess, ValueError):
        return None


def still_open(ports: Sequence[int], seconds: float) -> list[int]:
    """Return the ports that something listens on after so long; threads of an ended process may take a moment.

    A port that another run has been given since, which its mark shows, is not counted.
    """
    end = time.monotonic() + seconds
    while (found := [port for port in ports if not _is_free(port)]) and time.monotonic() < end:
        time.sleep(0.05)
    return [port for port in found if not _belongs_to_another_run(port)]


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _belongs_to_another_run(port: int) -> bool:
    """Tell whether all that hold a port are processes of runs, none of which is the one that has ended."""
    holders = {x.pid for x in psutil.net_connections("tcp") if x.laddr and x.laddr.port == port and x.pid is not None}
    environments = [_environment(pid) for pid in holders]
    return bool(environments) and all(MARK in environment for environment in environments)


def _environment(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal. Raises Ended if there is nobody to get it."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        raise Ended(0) from None
