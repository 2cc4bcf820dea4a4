"""What all tests share."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.helpers.long_tests import is_long, long_patterns
from tests.helpers.packages import SKIP_REASON

# Tests make all they need: looking for a model on a hub is a mistake, and must not wait for a time-out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shared two-core machine has pauses: time is no sign of a fault. Failures must be the same everywhere.
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


@pytest.fixture(scope="module", autouse=True)
def _no_world_is_left() -> Iterator[None]:
    """End the world of one process that a library call has joined: tests of the next file may start another one."""
    yield
    if torch.distributed.is_initialized():
        from llava_mcore.parallel.groups import shut_down

        shut_down()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount small disks, of a size such as 16K, until the test has ended; skip where nobody may mount."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the server that test processes are forked from: there is one for all, so it must import for all.

    It imports while the first tests run. A process that has looked for GPUs must not be forked. With `-n`, the process
    that deals tests out runs none.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not torch.cuda.is_available() and not session.config.getoption("numprocesses", None):
        multiprocessing.set_forkserver_preload(["tests.helpers.preload"])
        multiprocessing.forkserver.ensure_running()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what is imported out of garbage collections: each forked loader process would copy all of it for one.

    Forked processes, of `energon prepare` too, leave out all that they inherit. Freeing there what other tests left,
    such as an object with threads, crashes them now and then, and Energon then waits forever.
    """
    gc.collect()
    gc.freeze()
    os.register_at_fork(after_in_child=gc.freeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `long_tests.txt`; skip tests marked `gpu` where there is none."""
    patterns = long_patterns()
    for item in items:
        if is_long(item.nodeid, patterns):
            item.add_marker(pytest.mark.long)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that were skipped because a package is missing, a line for each package."""
    skipped = defaultdict[str, list[str]](list)
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple) and SKIP_REASON in report.longrepr[2]:
            skipped[report.longrepr[2].partition(SKIP_REASON)[2]].append(report.nodeid)
    for package, names in sorted(skipped.items()):
        terminalreporter.write_line(f"skipped, {package} is not installed: {', '.join(names)}", yellow=True)
