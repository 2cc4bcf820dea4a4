"""The importer is killed, run again, run with other processes, and given something else."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
import pytest

from llava_mcore.data.storage.dataset_path import META, SCRATCH, check_dataset
from llava_mcore.errors import DataError
from llava_mcore.prepare.journal import Journal
from llava_mcore.prepare.output import finish
from llava_mcore.prepare.output.shard import ShardMaker
from llava_mcore.prepare.output.tar_file import ShardWriter
from llava_mcore.prepare.shard_plan import Options
from llava_mcore.prepare.sources.base import Cuts
from llava_mcore.prepare.sources.detect import Opening, find_files
from tests.helpers import prepare_cases as cases
from tests.helpers.commands import ROOT
from tests.helpers.prepare_cases import Quiet, contents, make, shard_bytes, vqa_cases

NUM_SHARDS = 5


class Killed(BaseException):
    """Stands for a kill: nothing in the program may catch it."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return cases.write_llava_lines(tmp_path / "src", vqa_cases(4 * NUM_SHARDS - 1))


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, bytes]:
    make(source, tmp_path / "whole")
    return shard_bytes(tmp_path / "whole")


def test_everything_is_on_the_disk_before_the_dataset_is_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure must not leave a .nv-meta whose files are empty."""
    flushed, fsync = list[str](), os.fsync

    def record(descriptor: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path / "out"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    make(source, tmp_path / "out")
    shards = {path.name for path in (tmp_path / "out").glob("*.tar")}
    assert {f"{SCRATCH}/{name}.idx.{os.getpid()}.part" for name in shards} <= set(flushed)
    written = {path.name for path in (tmp_path / "out" / META).iterdir()}
    assert written == {name.rpartition("/")[2] for name in flushed if name.startswith(f"{SCRATCH}/nv-meta/")}
    assert "." in flushed[flushed.index(f"{SCRATCH}/nv-meta") :]


def looks_finished(folder: Path) -> bool:
    try:
        check_dataset(folder)
    except DataError:
        return False
    return True


def die_after(patch: pytest.MonkeyPatch, owner: Any, name: str, calls: int, *, before: bool) -> None:
    """Let the given call of a function be the last thing that happens, or not even happen."""
    original, seen = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if before and seen > calls:
            raise Killed
        result = original(*args, **kwargs)
        if not before and seen > calls:
            raise Killed
        return result

    patch.setattr(owner, name, wrapped)


PLACES: list[tuple[Any, str, int]] = [
    (ShardWriter, "add", 6),
    (ShardWriter, "finish", 2),
    (Journal, "add", 1),
    (os, "fsync", 3),
    (finish, "_write_index", 0),
    (finish, "_write_yaml", 0),
    (finish, "_write_yaml", 2),
    (Path, "rename", 0),
    (Path, "rename", 7),
    (shutil, "rmtree", 1),
]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name", "calls"), PLACES)
def test_killed_anywhere_and_run_again(
    owner: Any, name: str, calls: int, before: bool, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, owner, name, calls, before=before)
        with pytest.raises(Killed):
            make(source, out)
    assert not looks_finished(out) or shard_bytes(out) == whole
    result = make(source, out)
    assert shard_bytes(out) == whole and looks_finished(out)
    assert result.counts.conversations == 4 * NUM_SHARDS - 1
    assert not list((out / ".prepare").glob("*.part"))


@pytest.mark.long
def test_a_process_killed_from_outside(source: Path, tmp_path: Path) -> None:
    """The real command, killed with -9 while it works and run again while its own processes notice."""
    source = cases.write_llava_lines(tmp_path / "much", vqa_cases(300))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "llava_mcore", "prepare", source, "--out", out, "--samples-per-shard", "10"]
    command.append("--keep-order")
    process = subprocess.Popen([*command, "--num-workers", "2"], cwd=ROOT, stdout=subprocess.PIPE)
    end = time.monotonic() + 200
    while not (out / "000003.tar").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not looks_finished(out)
    result = make(source, out, Options(rows_per_shard=10))
    assert 0 < result.num_made < 30 and looks_finished(out)
    assert not psutil.wait_procs(children, timeout=30)[1]
    make(source, tmp_path / "whole", Options(rows_per_shard=10))
    assert shard_bytes(out) == shard_bytes(tmp_path / "whole")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_processes_make_the_same_bytes(num_workers: int, source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    make(source, tmp_path / "out", num_workers=num_workers)
    assert shard_bytes(tmp_path / "out") == whole
    for name in ("manifest.json", "skipped.jsonl", ".nv-meta/index.uuid", ".nv-meta/split.yaml", ".nv-meta/.info.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_dead_process_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()

    class Deadly(Quiet):
        def advance(self, number: int) -> None:
            children = json.loads(subprocess.check_output([sys.executable, "-c", CHILDREN, str(parent)]))
            for pid in children:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(cases, "Quiet", Deadly)
    big = cases.write_llava_lines(tmp_path / "much", vqa_cases(300) * 5)
    with pytest.raises(DataError, match=r"a process was killed.*run the same command to continue"):
        make(big, tmp_path / "out", num_workers=2)
    monkeypatch.undo()
    assert not looks_finished(tmp_path / "out")
    assert make(big, tmp_path / "out").counts.conversations == 1500


CHILDREN = """
import json, sys, psutil
pool = [c for c in psutil.Process(int(sys.argv[1])).children(recursive=True) if c.ppid() != int(sys.argv[1])]
print(json.dumps([c.pid for c in pool]))
"""


def test_missing_and_cut_shards_are_made_again(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "whole"
    (out / "000001.tar").unlink()
    with (out / "000003.tar").open("r+b") as file:
        file.truncate(700)
    (out / ".prepare" / "000002.tar.part").write_bytes(b"rest")
    result = make(source, out)
    assert result.num_made == 2 and shard_bytes(out) == whole and looks_finished(out)
    untouched = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".tar", ".sqlite")}
    assert make(source, out).num_made == 0
    assert untouched == {path: path.stat().st_mtime_ns for path in untouched}


def test_a_shard_changed_after_it_was_written(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    shard = tmp_path / "whole" / "000001.tar"
    shard.write_bytes(b"\0" * len(whole[shard.name]))
    shutil.rmtree(tmp_path / "whole" / ".nv-meta")
    with pytest.raises(DataError, match=r"000001\.tar has 0 samples, but 4 were written"):
        make(source, tmp_path / "whole")
    assert not looks_finished(tmp_path / "whole")


def test_a_folder_of_version_0_1_0_is_continued(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """It called images pictures in its list of options and its counts."""
    out = tmp_path / "whole"
    for file in (out / ".prepare").glob("*.json*"):
        text = file.read_text(encoding="utf-8")
        text = text.replace("--max-image-pixels", "--max-picture-pixels").replace('"images":', '"pictures":')
        text = text.replace('"audios":', '"sounds":').replace('"audio_seconds":', '"sound_seconds":')
        file.write_text(text, encoding="utf-8")
    totals = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["totals"]
    shutil.rmtree(out / ".nv-meta")
    (out / "000001.tar").unlink()
    make(source, out)
    assert looks_finished(out) and shard_bytes(out) == whole
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8"))["totals"] == totals
    assert totals["images"] > 0


def test_another_request_is_refused(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "whole"
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace("It is 1.", "It is 8."), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        make(source, out, Options(rows_per_shard=3, check_images=True))
    message = str(caught.value)
    assert "3 problems" in message and "--overwrite" in message
    assert "--samples-per-shard: started with 4, now 3" in message
    assert "--check-images: started with False, now True" in message and "llava.jsonl has changed" in message
    assert looks_finished(out) and shard_bytes(out) == whole
    other = cases.write_sharegpt(tmp_path / "other", vqa_cases(2))
    with pytest.raises(DataError, match=r"(?s)llava\.jsonl is no longer a source.*sharegpt\.json is a new source"):
        make(other, out)
    make(other, out, overwrite=True)
    assert list(shard_bytes(out)) == ["000000.tar"] and len(contents(out)) == 2
    assert sorted(p.name for p in out.glob("*.idx")) == ["000000.tar.idx"]


@pytest.mark.parametrize(
    "writer", [cases.write_parquet, cases.write_hub, cases.write_saved, cases.write_triples, cases.write_tars]
)
def test_every_kind_of_source_shows_that_it_changed(writer: Any, tmp_path: Path) -> None:
    """With as many rows as before, and as many bytes."""
    before = vqa_cases(6)
    make(writer(tmp_path / "a", before), tmp_path / "out")
    changed = writer(tmp_path / "b", [*before[:5], cases.Case(before[5].turns, (cases.picture(11, size=(25, 18)),))])
    with pytest.raises(DataError, match="has changed"):
        make(changed, tmp_path / "out")


def test_foreign_and_busy_folders_are_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match="is not empty, and no earlier `prepare` has written it"):
        make(source, tmp_path / "full", overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        make(source, source)
    with Journal(tmp_path / "out"), pytest.raises(DataError, match="another `prepare` is writing"):
        make(source, tmp_path / "out")


def test_the_first_error_of_a_process_ends_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ShardMaker, shard: int, segments: Any) -> None:
        raise DataError("the disk is gone")

    monkeypatch.setattr(ShardMaker, "make", fails)
    with pytest.raises(DataError, match="the disk is gone"):
        make(source, tmp_path / "out")


def test_memory_does_not_grow_with_a_list(tmp_path: Path) -> None:
    """A JSON list of 20 MB, and one of its shards, within 8 MB."""
    path = tmp_path / "big.json"
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(4000):
            words = "".join(generator.choices("abcdefgh ", k=5000))
            row = {"id": i, "conversations": [{"from": "human", "value": words}, {"from": "gpt", "value": "漢字"}]}
            file.write(("[" if i == 0 else ",\n") + json.dumps(row, ensure_ascii=False))
        file.write("]")
    assert path.stat().st_size > 20e6
    (file_,) = find_files(path, Opening())
    tracemalloc.start()
    try:
        scan = file_.scan(Cuts(0, 0, 500))
        assert scan.num_rows == 4000 and len(scan.segments) == 8
        assert sum(1 for _ in file_.read(scan.segments[7])) == 500
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8e6, f"{peak / 1e6:.1f} MB"
