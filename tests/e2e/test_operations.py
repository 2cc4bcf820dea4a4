"""A run as a cluster ends it: SIGTERM to every process, in the middle of its work. What it leaves, and resumes from."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.async_save import measured
from benchmarks.runs import read_lines
from llava_mcore.checkpoint.choose_start import start_point
from llava_mcore.checkpoint.complete import incomplete, iterations
from llava_mcore.config.load import load_run_config
from llava_mcore.convert.import_hf import import_hf
from tests.e2e.chaos_run import Running, still_open
from tests.helpers.commands import ROOT, command, kill_tree, read_metrics, run
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava


def make_material(root: Path) -> None:
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    make_dataset(root / "data")


def flags(root: Path) -> list[Any]:
    places = ("--megatron-load-dir", root / "megatron", "--tokenizer-load-dir", root / "hf", "--save-dir", root)
    sizes = ("-g", 2, "--micro-batch-size", 1, "--global-batch-size", 4, "--seq-length", 64, "--train-iters", 100_000)
    saving = ("--save-interval", 6, "--save-optim", "--load-optim", "--async-save", "--non-persistent-save-interval", 4)
    more = ("--profile", "2:3", "logging.profile_ranks=1", "--num-workers", 2, "--dist-ckpt", "--no-add-class-token")
    more += ("--log-interval", 3)
    return [*places, *sizes, *saving, *more, "--data-path", root / "data"]


def send_to_all(pid: int, number: signal.Signals) -> int:
    """Send a signal to a process and everything below it, as SLURM does; return the number of loader processes."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    workers = []
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            words = process.cmdline()
            if "llava_mcore.launch.worker" in words and "llava_mcore.launch.torchrun" not in words:
                workers.append(process)
    loaders = [x for x in workers if x.ppid() in {parent.pid for parent in workers}]
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    assert len(workers) - len(loaders) == 2
    return len(loaders)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Return the folder, the exit code and the output of a run of which every process got a SIGTERM."""
    root: Path = tmp_path_factory.mktemp("operations")
    make_material(root)
    process = subprocess.Popen(
        command("train/run.py", *flags(root)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    try:
        end = time.monotonic() + 200
        while not any(line["iteration"] >= 11 for line in read_metrics(root / "run")):
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < end
            time.sleep(0.05)
        assert send_to_all(process.pid, signal.SIGTERM) >= 2
        text, _ = process.communicate(timeout=300)
    finally:
        kill_tree(process.pid)
    return root / "run", process.returncode, text


def test_sigterm_to_every_process_still_saves(ended: tuple[Path, int, str]) -> None:
    folder, code, text = ended
    assert code == 75, text[-4000:]
    last = read_metrics(folder)[-1]["iteration"]
    assert iterations(folder)[-1] == last and incomplete(folder / f"iter_{last:07d}") is None
    assert f"stopped early, after iteration {last}" in text


def test_lines_of_the_chosen_interval(ended: tuple[Path, int, str]) -> None:
    """The console has a line every third step."""
    _, _, text = ended
    lines = [int(number) for number in re.findall(r"^step (\d+)/100000 ", text, re.MULTILINE)]
    assert lines[:3] == [3, 6, 9] and not any(number % 3 for number in lines)
    assert "--dist-ckpt is always on" in text


def test_what_is_not_kept_is_replaced(ended: tuple[Path, int, str]) -> None:
    folder, _, _ = ended
    assert [number for number in iterations(folder) if number % 6 == 0][:1] == [6]
    (newest,) = iterations(folder / "non_persistent")
    assert newest >= 8 and newest % 4 == 0 and newest % 12 and newest not in iterations(folder)
    assert incomplete(folder / "non_persistent" / f"iter_{newest:07d}") is None
    assert start_point(load_run_config(folder / "run.yaml")).checkpoint == folder / f"iter_{iterations(folder)[-1]:07d}"


def test_saves_are_measured(ended: tuple[Path, int, str]) -> None:
    steps, saves = read_metrics(ended[0]), read_lines(ended[0] / "saves.jsonl")
    assert [save["iteration"] for save in saves][:3] == [4, 6, 8]
    assert all(save["background"] for save in saves[:-1])
    # The stop's own save is waited for. There is none if it came just after that of an interval.
    assert not saves[-1]["background"] or saves[-1]["iteration"] % 6 == 0
    found = measured(steps, [saves[0], saves[-1]], warm_up=1)
    number = saves[0]["finished_after_iteration"] - 4
    assert found["step beside a save"]["number"] == number >= 1
    assert found["ratio"] == found["step beside a save"]["median"] / found["step"]["median"]
    assert 0 < saves[0]["start_waited_seconds"] < saves[0]["seconds"]


def test_profile_of_the_chosen_iterations_and_rank(ended: tuple[Path, int, str]) -> None:
    """One trace is written, of these iterations of that rank."""
    (file,) = (ended[0] / "profile").iterdir()
    assert file.name == "rank_00001.iterations_2-3.trace.json.gz"
    with gzip.open(file) as handle:
        names = {event.get("name") for event in json.load(handle)["traceEvents"]}
    assert {"iteration 2", "iteration 3", "aten::mm"} <= names and "iteration 4" not in names


@pytest.mark.long
def test_a_killed_rank_with_loader_processes_ends_the_run_within_seconds(ended: tuple[Path, int, str]) -> None:
    """The last test here: it resumes the run. Meanwhile a second one of that name is refused."""
    folder, _, _ = ended
    last = read_metrics(folder)[-1]["iteration"]
    output = folder.parent / "resumed.out"
    with Running(output, folder, flags(folder.parent)) as running:
        running.wait_until(lambda: "first iteration done" in running.text())
        ranks, loaders, ports = running.ranks(), running.loaders(), running.ports()
        assert sorted(ranks) == [0, 1] and len(loaders) == 4
        text = run("train/run.py", *flags(folder.parent), expect=2)
        assert f"{folder} is in use by process {running.process.pid} on" in text and len(text.splitlines()) <= 2
        assert read_metrics(folder)[-1]["iteration"] > last, "the first one continues"
        ranks[0].kill()
        assert running.wait_for_end(20) < 12  # the limit is 3 s, and another 9 s for a loaded machine
        assert running.process.wait() == 137 and still_open(ports, seconds=1) == []
        error, advice = running.text().splitlines()[-2:]
        assert error == "error: rank 0 was ended by SIGKILL; all ranks were stopped"
        assert re.fullmatch(r"the same command resumes at iteration \d+", advice)
    assert not (folder / ".lock").exists()
