"""Which checkpoint a run resumes from, and which are deleted."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from llava_mcore.checkpoint import complete
from llava_mcore.checkpoint.choose_start import RUN_ID, StartPoint, ensure_run_id, resumes, run_id, start_point
from llava_mcore.checkpoint.complete import (
    all_but,
    discard,
    iterations,
    newest_complete,
    outdated,
    remove_leftovers,
    write_run_json,
)
from llava_mcore.checkpoint.layout import RUN_FILE, TRACKER, iteration_folder, latest_checkpoint, write_tracker
from llava_mcore.config.load import load_run_config, save_run_config
from llava_mcore.errors import CheckpointError


def add(
    root: Path,
    *numbers: int,
    tracker: int | None = None,
    save_dir: Path | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Make complete checkpoints with run.json; the tracker names the last one, or another."""
    for number in numbers:
        folder = iteration_folder(root, number)
        (folder / "hf").mkdir(parents=True)
        for name in ("metadata.json", "__0_0.distcp", "hf/config.json"):
            (folder / name).write_text("x" * (number + 1))
        written_by = {} if save_dir is None else {"run": {"checkpoint": {"save_dir": str(save_dir)}}}
        write_run_json(folder, {"iteration": number, **written_by, **more})
    write_tracker(root, numbers[-1] if tracker is None else tracker)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"-3", b"9" * 5000, "٣".encode(), b"3.0", b"[3]", b"0x3"])
def test_a_tracker_without_a_number_is_told_and_limits_nothing(tmp_path: Path, content: bytes) -> None:
    add(tmp_path, 3, 4)
    (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{TRACKER}: expected an iteration number, found ") as caught:
        latest_checkpoint(tmp_path)
    assert len(str(caught.value)) < 400
    choice = newest_complete(tmp_path)
    assert choice is not None and choice.iteration == 4 and TRACKER in choice.passed_over[0]


def test_the_newest_complete_one_and_why_not_the_others(tmp_path: Path) -> None:
    """Incomplete checkpoints are skipped, each with its reason."""
    assert newest_complete(tmp_path) is None and newest_complete(tmp_path / "nowhere") is None
    add(tmp_path, 5, 10, 15, 20, 25)
    choice = newest_complete(tmp_path)
    assert choice is not None and (choice.iteration, choice.passed_over) == (25, ())
    (iteration_folder(tmp_path, 25) / "metadata.json").unlink()
    (iteration_folder(tmp_path, 20) / "__0_0.distcp").write_text("x")
    (iteration_folder(tmp_path, 15) / "hf" / "config.json").unlink()
    choice = newest_complete(tmp_path)
    assert choice is not None and choice.folder == iteration_folder(tmp_path, 10)
    first, second, third = choice.passed_over
    assert "iter_0000025" in first and "metadata.json is missing" in first
    assert "iter_0000020" in second and "__0_0.distcp has 1 bytes, 21 were written" in second
    assert "iter_0000015" in third and "hf/config.json is missing" in third
    (iteration_folder(tmp_path, 10) / "run.json").write_text("{")
    choice = newest_complete(tmp_path)
    assert choice is not None and choice.iteration == 5 and "run.json cannot be read" in choice.passed_over[3]
    shutil.rmtree(iteration_folder(tmp_path, 5))
    with pytest.raises(CheckpointError, match=r"no complete checkpoint \(4 problems\)"):
        newest_complete(tmp_path)


def test_the_tracker_is_a_limit_that_a_user_may_set_back(tmp_path: Path) -> None:
    add(tmp_path, 5, 10, 15, tracker=10)
    choice = newest_complete(tmp_path)
    assert choice is not None and choice.iteration == 10
    assert "iter_0000015: newer than iteration 10" in choice.passed_over[0]


def test_a_file_that_grew_or_is_known_to_be_damaged(tmp_path: Path) -> None:
    add(tmp_path, 5, 10, 15)
    (iteration_folder(tmp_path, 15) / "__0_0.distcp").write_text("x" * 99)
    choice = newest_complete(tmp_path, {iteration_folder(tmp_path, 10): "a checksum differs"})
    assert choice is not None and choice.iteration == 5
    first, second = choice.passed_over
    assert "__0_0.distcp has 99 bytes, 16 were written" in first and second.endswith("iter_0000010: a checksum differs")


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        (["checkpoint.save_optim=true"], ["checkpoint.load_optim=true"], True),
        (["checkpoint.save_optim=true", "stage=1"], ["checkpoint.load_optim=true"], False),
        ([], ["checkpoint.load_optim=true"], False),
        (["checkpoint.save_optim=true"], [], False),
        (None, ["checkpoint.load_optim=true"], False),
    ],
)
def test_only_the_same_stage_with_its_optimizer_is_resumed(
    tmp_path: Path, saved: list[str] | None, now: list[str], expected: bool
) -> None:
    """Imported weights and those of an earlier stage begin a new run, with the same command line."""
    if saved is not None:
        save_run_config(load_run_config(None, saved), tmp_path / RUN_FILE)
    assert resumes(load_run_config(None, now), StartPoint("load", tmp_path, 5, tmp_path)) is expected


@pytest.mark.parametrize("text", ["", "15x", None])
def test_without_a_readable_tracker_the_newest_counts(tmp_path: Path, text: str | None) -> None:
    """None: killed between the first checkpoint's rename and the tracker."""
    add(tmp_path, 5, 10)
    if text is None:
        (tmp_path / TRACKER).unlink()
    else:
        (tmp_path / TRACKER).write_text(text)
    choice = newest_complete(tmp_path)
    assert choice is not None and choice.iteration == 10
    assert ("expected an iteration number" in " ".join(choice.passed_over)) == (text is not None)


def test_a_tracker_that_names_nothing(tmp_path: Path) -> None:
    add(tmp_path, 5, 10, tracker=12)
    choice = newest_complete(tmp_path)
    assert choice is not None and choice.iteration == 10
    assert "names iteration 12" in choice.passed_over[0]


def test_run_json_lists_every_file_with_its_size(tmp_path: Path) -> None:
    add(tmp_path, 7)
    content = json.loads((iteration_folder(tmp_path, 7) / "run.json").read_text())
    assert content == {"iteration": 7, "files": {"__0_0.distcp": 8, "hf/config.json": 8, "metadata.json": 8}}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (None, None, [2, 4, 6, 8, 10, 12]),
        (1, None, [10, 12]),
        (2, None, [8, 10, 12]),
        (2, 4, [4, 8, 10, 12]),
        (9, None, [2, 4, 6, 8, 10, 12]),
    ],
)
def test_what_is_kept(tmp_path: Path, keep_last: int | None, keep_every: int | None, kept: list[int]) -> None:
    """Iteration 12 belongs to a future that the run was set back from: it is neither counted nor deleted."""
    add(tmp_path, 2, 4, 6, 8, 10, 12)
    for folder in outdated(tmp_path, newest=10, keep_last=keep_last, keep_every=keep_every):
        discard(folder)
    assert iterations(tmp_path) == kept


def test_killed_saves_and_deletions_leave_nothing(tmp_path: Path) -> None:
    add(tmp_path, 2, 4)
    for name in (".iter_0000006.partial", ".iter_0000002.deleted"):
        (tmp_path / name / "loader").mkdir(parents=True)
    (tmp_path / "iter_notes").mkdir()
    remove_leftovers(tmp_path)
    discard(iteration_folder(tmp_path, 2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000004", "iter_notes", TRACKER]


def test_what_cannot_be_deleted_is_in_nobody_s_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where a file that some process still has open stays in its folder as .nfs…"""

    def rmtree(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    monkeypatch.setattr(complete.shutil, "rmtree", rmtree)
    add(tmp_path, 2, 4)
    for name in (".iter_0000002.deleted", ".iter_0000004.partial", ".iter_0000006.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".nfs0001").touch()
    for _ in range(2):
        remove_leftovers(tmp_path)
    discard(iteration_folder(tmp_path, 2))
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")]
    assert iterations(tmp_path) == [4] and caplog.text.count("could not be deleted") == 7
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000004", TRACKER]


def test_a_deletion_in_the_background_is_waited_for(tmp_path: Path) -> None:
    """A process that ends by `leave` does not tear its threads down."""
    (tmp_path / "old" / "hf").mkdir(parents=True)
    code = f"""
import shutil, time
from pathlib import Path
from llava_mcore.checkpoint import complete
from llava_mcore.processes.control import exit_now
rmtree = shutil.rmtree
shutil.rmtree = lambda folder: (time.sleep(1), rmtree(folder))
complete.delete_in_background([Path({str(tmp_path / "old")!r})])
exit_now(3)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3
    assert not (tmp_path / "old").exists()


def start(save_dir: Path, *more: str) -> StartPoint:
    """Return where a run of the name `run` resumes from; it needs no load folder while it has checkpoints."""
    overrides = [f"checkpoint.save_dir={save_dir}", "checkpoint.load_optim=true", *more]
    return start_point(load_run_config(None, overrides))


def test_a_run_goes_on_from_the_newest_of_what_is_kept_and_what_is_not(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "run" / "non_persistent"
    add(fast, 7)
    assert start(tmp_path).checkpoint == iteration_folder(fast, 7)
    add(run, 5, 10)
    assert start(tmp_path).checkpoint == iteration_folder(run, 10)
    add(fast, 10)
    assert start(tmp_path).checkpoint == iteration_folder(run, 10)
    add(fast, 12)
    assert (start(tmp_path).checkpoint, start(tmp_path).iteration) == (iteration_folder(fast, 12), 12)
    (iteration_folder(fast, 12) / "__0_0.distcp").unlink()
    found = start(tmp_path)
    assert (
        found.checkpoint == iteration_folder(run, 10)
        and "iter_0000012: __0_0.distcp is missing" in found.passed_over[0]
    )
    for folder in (run, fast):
        for number in iterations(folder):
            (iteration_folder(folder, number) / "metadata.json").unlink()
    way_out = r"run has no complete checkpoint; to start again, delete it or give another --name \(2 problems\)"
    with pytest.raises(CheckpointError, match=way_out):
        start(tmp_path)
    shutil.rmtree(fast)
    with pytest.raises(CheckpointError, match=way_out):
        start(tmp_path)


def test_a_run_that_was_set_back_leaves_its_future_alone(tmp_path: Path) -> None:
    add(tmp_path / "run", 5, 10, tracker=5)
    add(tmp_path / "run" / "non_persistent", 12)
    found = start(tmp_path)
    assert found.iteration == 5
    assert any("iter_0000012: newer than iteration 5" in reason for reason in found.passed_over)


def test_a_fast_disk_may_hold_another_run_of_the_same_name(tmp_path: Path) -> None:
    fast, mine = tmp_path / "fast", tmp_path / "mine"
    add(fast / "run", 12, save_dir=tmp_path / "theirs")
    add(mine / "run", 10)
    found = start(mine, f"checkpoint.non_persistent_dir={fast}")
    assert found.iteration == 10 and "belongs to another run of this name" in found.passed_over[0]
    add(fast / "run", 14, save_dir=mine)
    assert start(mine, f"checkpoint.non_persistent_dir={fast}").iteration == 14
    assert ensure_run_id(mine / "run") == ensure_run_id(mine / "run") == run_id(mine / "run")
    add(fast / "run", 16, save_dir=mine, more={RUN_ID: ensure_run_id(mine / "run")})
    assert start(mine, f"checkpoint.non_persistent_dir={fast}").iteration == 16
    shutil.rmtree(mine / "run")
    add(mine / "run", 1)
    found = start(mine, f"checkpoint.non_persistent_dir={fast}")
    assert found.iteration == 1 and "belongs to an earlier run of this name" in found.passed_over[0]
    shutil.rmtree(iteration_folder(fast / "run", 16))
    assert all_but(iteration_folder(fast / "run", 12)) == [iteration_folder(fast / "run", 14)]
