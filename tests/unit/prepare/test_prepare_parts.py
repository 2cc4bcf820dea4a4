"""Samples of several files, in folders and tars as users have them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.errors import DataError
from llava_mcore.prepare.sources.detect import Opening
from tests.helpers.prepare_cases import make, read_back
from tests.unit.data.test_data_shards import picture

PICTURE = picture(1)
TWIN = b"\0\5\x16\7\0\2\0\0Mac OS X        "
"""Beginning of the files in which macOS keeps attributes."""


def files_of(stem: str, parts: str = "jpg json txt") -> dict[str, bytes]:
    contents = {"json": json.dumps({"question": f"What is {stem}?"}).encode(), "txt": stem.encode()}
    return {f"{stem}.{part}": contents.get(part, PICTURE) for part in parts.split()}


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def summary(folder: Path) -> list[tuple[str, str, int]]:
    """Return id, answer and number of images of each sample."""
    samples = read_back(folder)
    return [(s["source"]["id"], s["messages"][-1]["content"], len(s["pictures"])) for s in samples]


def test_dots_and_subfolders_in_a_folder(tmp_path: Path) -> None:
    """A name is divided at its last dot; what belongs to no sample is counted."""
    numbered = {"b.0.jpg": PICTURE, "b.1.png": PICTURE, **files_of("b", "json txt")}
    others = {"notes.md": b"", "sub/alone.jpg": PICTURE, "._b.json": TWIN, ".hidden/c.json": b"{}"}
    files = {**files_of("a.v2"), **numbered, **files_of("sub/c.d"), **others}
    result = make(write_folder(tmp_path / "src", files), tmp_path / "out")
    assert summary(tmp_path / "out") == [("a.v2", "a.v2", 1), ("b", "b", 2), ("sub/c.d", "sub/c.d", 1)]
    assert result.counts.skipped == 0
    assert result.notes == ("src: 2 files belong to no sample: notes.md, sub/alone.jpg",)


def test_subfolders_named_like_splits(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", {**files_of("train/0"), **files_of("val/1")})
    make(source, tmp_path / "out")
    assert summary(tmp_path / "out") == [("0", "train/0", 1)]
    with pytest.raises(DataError, match="no part 'test', only train, val; choose with --source-split"):
        make(source, tmp_path / "none", how=Opening(split="test"))


def test_twins_that_macos_writes(tmp_path: Path) -> None:
    files = {**files_of("000"), **files_of("001")}
    twins = [pair for name, data in files.items() for pair in ((f"./._{name}", TWIN), (f"./{name}", data))]
    result = make(write_tar(tmp_path / "mac.tar", twins), tmp_path / "tar")
    assert summary(tmp_path / "tar") == [("./000", "000", 1), ("./001", "001", 1)]
    make(write_folder(tmp_path / "mac", dict(twins)), tmp_path / "folder")
    assert [answer for _, answer, _ in summary(tmp_path / "folder")] == ["000", "001"]
    assert result.counts.skipped == 0 and result.notes == ()


def test_tars_whose_parts_are_not_adjacent(tmp_path: Path) -> None:
    """All such files are told at once. A sample that is repeated as a whole is two samples."""
    files = {**files_of("000"), **files_of("001"), **files_of("002")}
    by_kind = sorted(files.items(), key=lambda item: item[0].rpartition(".")[2])
    for name in ("a", "b"):
        write_tar(tmp_path / f"{name}.tar", by_kind)
    with pytest.raises(DataError) as caught:
        make(tmp_path, tmp_path / "out")
    message = "parts of 000 (and of 2 more samples) are not adjacent; write the tar with --sort=name"
    assert all(f"{tmp_path / name}.tar: {message}" in str(caught.value) for name in ("a", "b"))
    write_tar(tmp_path / "twice.tar", [*files_of("000").items(), *files_of("001").items(), *files_of("000").items()])
    make(tmp_path / "twice.tar", tmp_path / "twice")
    assert [answer for _, answer, _ in summary(tmp_path / "twice")] == ["000", "001", "000"]


def test_conversations_in_tars(tmp_path: Path) -> None:
    """With or without images, which may also be files that the row names. Parts that nothing reads are counted."""
    turns = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    (tmp_path / "p.jpg").write_bytes(PICTURE)

    def row(**more: Any) -> bytes:
        return json.dumps({"conversations": turns, **more}).encode()

    files = {
        "0.json": row(),
        "1.jpg": PICTURE,
        "1.json": row(image="1.jpg"),
        "1.cls": b"3",
        "2.json": row(image="p.jpg"),
    }
    result = make(write_tar(tmp_path / "x.tar", files.items()), tmp_path / "out")
    assert summary(tmp_path / "out") == [("0", "Hello.", 0), ("1", "Hello.", 1), ("2", "Hello.", 1)]
    assert result.notes == ("x.tar: 1 parts are not read: .cls",)
    dotted = write_tar(tmp_path / "y.tar", files_of("img.v2").items())
    skipped = make(dotted, tmp_path / "dotted").first_skipped
    assert "img has no .json, only .v2.jpg, .v2.json, .v2.txt" in str(skipped[0])
