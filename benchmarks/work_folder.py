"""A temporary folder that is deleted however a benchmark ends: by itself, interrupted, or killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WATCHER = """
import pathlib, shutil, sys, time
sys.stdin.read()
for _ in range(60):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not pathlib.Path(sys.argv[1]).exists():
        break
    time.sleep(1)
"""
"""A program that waits until its standard input ends, and deletes a folder, from which others may still have to stop
writing."""


@contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    """Yield a new folder in `parent`, by default the system's for temporary files.

    A process of its own deletes it once this one has ended, even by SIGKILL, with which `timeout --kill-after` cuts
    short what we would do ourselves.
    """
    folder = Path(tempfile.mkdtemp(dir=parent))
    command = [sys.executable, "-I", "-S", "-c", WATCHER, str(folder)]
    quiet = subprocess.DEVNULL  # or a pipe that reads from us would stay open for as long as it works
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield folder
    finally:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # `timeout` sends it to us and to our group
        watcher.communicate()
        signal.signal(signal.SIGINT, handler)
