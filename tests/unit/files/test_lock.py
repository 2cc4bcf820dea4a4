"""A folder's lock: who gets it, who is told by whom it is held, and when it is taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.files import folder_lock
from llava_mcore.files.folder_lock import FolderInUse, FolderLock, Holder

HOLDS = """
import sys, time
from pathlib import Path
from llava_mcore.files.folder_lock import FolderInUse, FolderLock
try:
    with FolderLock(Path(sys.argv[1]), activity="the folder", advice="wait", say=lambda line: print(line, flush=True)):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
        print("done", flush=True)
except FolderInUse as error:
    print(error, flush=True)
"""


def holding(path: Path, seconds: float) -> subprocess.Popen[str]:
    """Return a process that holds a lock."""
    process = contender(path, seconds)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def contender(path: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLDS, str(path), str(seconds)], stdout=subprocess.PIPE, text=True)


def locked(path: Path, **options: Any) -> FolderLock:
    return FolderLock(path, activity="the folder", advice="wait", **options)


def elsewhere(path: Path, **changes: Any) -> Holder:
    """Leave the lock file of a process on another machine."""
    holder = replace(Holder.here(), host="node17", machine="another", since="yesterday", **changes)
    path.write_text(json.dumps(asdict(holder)))
    return holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / ".lock"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it take a second, not ninety."""
    for name in ("_SECONDS_BETWEEN_LOOKS", "SECONDS_BETWEEN_BEATS", "_SECONDS_TO_SETTLE"):
        monkeypatch.setattr(folder_lock, name, 0.1)
    monkeypatch.setattr(folder_lock, "SECONDS_UNTIL_STALE", 1.0)


def test_a_second_process_is_told_who_holds_it(path: Path) -> None:
    process = holding(path, 60)
    begin = time.monotonic()
    with pytest.raises(FolderInUse, match=rf"the folder is in use by process {process.pid} on .*, since 20.*; wait"):
        locked(path).__enter__()
    assert time.monotonic() - begin < 1
    process.send_signal(signal.SIGSTOP)  # alive, if quiet
    os.utime(path, (0, 0))
    with pytest.raises(FolderInUse):
        locked(path).__enter__()
    process.kill()
    process.communicate()


def test_of_many_at_once_one_gets_it(path: Path) -> None:
    outputs = [process.communicate()[0] for process in [contender(path, 3) for _ in range(6)]]
    assert sorted(text.partition("\n")[0] == "held" for text in outputs) == [False] * 5 + [True]
    assert sum("is in use by process" in text for text in outputs) == 5
    assert not path.exists()


def test_what_a_killed_process_left_is_taken_over_at_once(path: Path) -> None:
    process = holding(path, 60)
    process.kill()
    process.communicate()
    assert path.exists()
    processes = [contender(path, 3) for _ in range(4)]
    outputs = [process.communicate()[0] for process in processes]
    assert sum("held\ndone\n" in text for text in outputs) == 1, outputs
    assert any(f"was left by process {process.pid} on" in text for text in outputs)
    assert list(path.parent.iterdir()) == []


def test_a_process_number_that_was_given_again_holds_nothing(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(replace(Holder.here(), started=time.time() - 3600, token="old"))))
    with locked(path) as held:
        assert json.loads(path.read_text())["token"] == held.me.token


@pytest.mark.usefixtures("fast")
def test_a_process_on_another_machine_shows_that_it_is_alive_by_renewing_it(path: Path) -> None:
    path.parent.mkdir()
    elsewhere(path)
    told: list[str] = []
    begin = time.monotonic()
    with locked(path, say=told.append):
        assert 0.5 < time.monotonic() - begin < 5, "it was new"
    assert "waiting up to" in told[0] and "process" in told[0] and "on node17" in told[0]
    assert "taken over" in told[-1] and len(told) == 2

    elsewhere(path)
    renewing = subprocess.Popen(
        [sys.executable, "-c", f"import os, time\nwhile True:\n  os.utime({str(path)!r}); time.sleep(0.05)"]
    )
    with pytest.raises(FolderInUse, match="on node17, since yesterday"):
        locked(path).__enter__()
    renewing.kill()
    renewing.wait()


def test_an_old_lock_of_another_machine_is_not_waited_for(path: Path) -> None:
    path.parent.mkdir()
    elsewhere(path)
    os.utime(path, (time.time() - 100, time.time() - 100))
    begin = time.monotonic()
    with locked(path):
        assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("changes", "job_has_ended"),
    [
        ({"job": "12"}, lambda job: job == "12"),
        ({"job": "13", "restarts": 0}, lambda job: None),
    ],
)
def test_what_a_slurm_job_left_is_taken_over_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], job_has_ended: Callable[[str], bool | None]
) -> None:
    """Another job that SLURM says has ended, or this one before it was requeued."""
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    path.parent.mkdir()
    elsewhere(path, **changes)
    begin = time.monotonic()
    with locked(path, job_has_ended=job_has_ended):
        assert time.monotonic() - begin < 2


def test_a_job_that_is_running_elsewhere_holds_it(path: Path) -> None:
    path.parent.mkdir()
    elsewhere(path, job="12")
    with pytest.raises(FolderInUse, match="of SLURM job 12 on node17"):
        locked(path, job_has_ended=lambda job: False).__enter__()


@pytest.mark.usefixtures("fast")
def test_a_file_that_is_no_lock_is_taken_over_when_it_is_old(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("")
    with locked(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_processes_of_one_group_are_there_together(path: Path) -> None:
    with locked(path, group="job 7") as first:
        assert json.loads(path.read_text())["token"] == first.me.token
        locked(path, group="job 7").require_free()
        with pytest.raises(FolderInUse):
            locked(path, group="job 8").require_free()
    locked(path).require_free()
    assert not path.exists()


@pytest.mark.usefixtures("fast")
def test_a_run_that_is_started_again_takes_over_its_own_lock(path: Path) -> None:
    """Its first node was killed, and starts on another machine: group and address are the same."""
    path.parent.mkdir()
    elsewhere(path, group="none 0 host:29500")
    locked(path, group="none 0 host:29500").require_free()
    with locked(path, group="none 0 host:29500") as lock:
        assert json.loads(path.read_text())["token"] == lock.me.token
    assert not path.exists()


@pytest.mark.usefixtures("fast")
def test_a_lock_file_that_another_process_took_and_put_back_is_held(path: Path) -> None:
    lock = locked(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(lock.me)))  # by a process that had judged the file before ours
    begin = path.stat().st_mtime
    with lock:
        time.sleep(0.5)
        assert path.stat().st_mtime > begin, "it is renewed"
    assert not path.exists()


@pytest.mark.usefixtures("fast")
def test_the_holder_notices_that_it_was_taken_over(path: Path) -> None:
    lines: list[str] = []
    with locked(path, lost=lines.append):
        begin = path.stat().st_mtime
        time.sleep(0.5)
        assert path.stat().st_mtime > begin and lines == []
        other = elsewhere(path)
        time.sleep(1)
    assert lines == [f"the folder was taken over by {other}"]
    assert path.exists(), "it is the other one's now"


@pytest.mark.usefixtures("fast")
def test_a_lock_file_that_was_deleted_is_there_again(path: Path) -> None:
    with locked(path) as held:
        path.unlink()
        time.sleep(0.5)
        assert json.loads(path.read_text())["token"] == held.me.token
    assert not path.exists()
