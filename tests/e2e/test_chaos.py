"""One run that meets much: it is asked to stop, then a rank is killed during a save. It ends as if uninterrupted.

`python -m tests.e2e.chaos` does it at random, as often as asked for.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llava_mcore.checkpoint.complete import iterations
from llava_mcore.checkpoint.layout import latest_iteration
from tests.e2e.chaos_world import LAYOUTS, World, make_material
from tests.helpers.commands import ROOT, command, kill_tree, read_metrics, run

ITERATIONS = 40


def workers(pid: int) -> list[psutil.Process]:
    """Return the training processes below run.py, without their loader processes."""
    found = psutil.Process(pid).children(recursive=True)
    mine = {
        x.pid for x in found if "llava_mcore.launch.worker" in x.cmdline() and "torchrun" not in " ".join(x.cmdline())
    }
    return [x for x in found if x.pid in mine and x.ppid() not in mine]


def interrupt(
    world: World, name: str, until: Callable[[], bool], act: Callable[[subprocess.Popen[str]], None]
) -> tuple[int, str]:
    """Start a run, do something to it at some moment, and return its exit code and output."""
    process = subprocess.Popen(
        command("train/run.py", *world.flags(name)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        end = time.monotonic() + 200
        while not until():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        act(process)
        text, _ = process.communicate(timeout=300)
    finally:
        kill_tree(process.pid)
    return process.returncode, text


@pytest.mark.cluster
def test_stopped_killed_and_resumed_equals_unbroken(tmp_path: Path) -> None:
    material, name = make_material(tmp_path / "material"), "broken"
    world = World(material, tmp_path / "save", LAYOUTS[2], ITERATIONS)
    folder = world.root / name

    def reached(iteration: int) -> bool:
        return any(line["iteration"] >= iteration for line in read_metrics(folder))

    code, text = interrupt(world, name, lambda: reached(2), lambda process: process.send_signal(signal.SIGTERM))
    assert code == 75, text[-4000:]
    stopped_at = latest_iteration(folder)
    assert stopped_at is not None and f"stopped early, after iteration {stopped_at} of {ITERATIONS}" in text
    assert stopped_at == read_metrics(folder)[-1]["iteration"] < ITERATIONS
    record = json.loads((folder / f"iter_{stopped_at:07d}" / "run.json").read_text())
    assert record["iteration"] == stopped_at and record["layout"]["data_parallel_size"] == 2

    def saves() -> bool:
        return reached(stopped_at + 2) and any(path.name.endswith(".partial") for path in folder.rglob(".iter_*"))

    begin: list[float] = []

    def kill_a_rank(process: subprocess.Popen[str]) -> None:
        begin.append(time.monotonic())
        workers(process.pid)[2].kill()

    code, text = interrupt(world, name, saves, kill_a_rank)
    assert code == 128 + signal.SIGKILL and "was ended by SIGKILL" in text, text[-4000:]
    assert f"resumed at iteration {stopped_at}" in text
    assert time.monotonic() - begin[0] < 60
    assert latest_iteration(folder) in iterations(folder)
    run("train/run.py", *world.flags(name))
    assert world.compared(folder) == world.whole
    assert len(iterations(folder)) == 2 and not list(folder.glob(".iter_*")), "--keep-last 2, and nothing half-written"
    assert not (folder / "stacks").exists()
