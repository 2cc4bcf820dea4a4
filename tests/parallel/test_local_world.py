"""Processes that a command starts for itself end with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llava_mcore.processes.local_world import enter
from tests.helpers.commands import ROOT

COMMAND = (
    "from llava_mcore.processes.local_world import run_world; from {module} import waits; run_world(waits, 2, {to!r})"
)


def waits(rank: int, num_processes: int, port: int, folder: str) -> None:
    """Be a rank that computes for hours."""
    enter(rank, num_processes, port)
    Path(folder, str(os.getpid())).touch()
    time.sleep(3600)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_ranks_end_with_their_command(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", COMMAND.format(module=__name__, to=str(tmp_path))]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert until(lambda: len(list(tmp_path.iterdir())) == 2, 120)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    if number == signal.SIGINT:  # Ctrl-C is for all processes of the terminal
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert until(lambda: not any(is_running(pid) for pid in ranks), 30)
    assert errors.count("Traceback") == (number == signal.SIGINT), "the command's own, and of no other process"
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()
