"""The importer: every kind of broken row is skipped with its reason; too many of them end it."""

from __future__ import annotations

import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.__main__ import main
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError
from llava_mcore.prepare.row_types import Reason
from llava_mcore.prepare.shard_plan import Options
from llava_mcore.prepare.sources.lines import BOM
from tests.helpers import prepare_cases as cases
from tests.helpers.prepare_cases import contents, make, picture, read_back, vqa_cases

Q, A = {"from": "human", "value": "What?"}, {"from": "gpt", "value": "This."}
MARKED = {"from": "human", "value": "<image>\nWhat?"}


def row(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "bad", "conversations": list(turns), **fields}


BAD: dict[str, tuple[Any, Reason]] = {
    "a number": (17, Reason.NOT_JSON),
    "half an object": (b'{"conversations": [', Reason.NOT_JSON),
    "Latin-1": (b'{"id": "bad", "question": "\xe9", "answer": "a"}', Reason.NOT_UTF8),
    "half a surrogate pair": (b'{"id": "bad", "question": "\\ud800", "answer": "a"}', Reason.NOT_UTF8),
    "nothing known": ({"id": "bad", "text": "a"}, Reason.NO_CONVERSATION),
    "no turns": (row(), Reason.NO_ANSWER),
    "no answer": (row(Q), Reason.NO_ANSWER),
    "question column only": ({"id": "bad", "question": "Q"}, Reason.NO_ANSWER),
    "empty answer": (row(Q, {"from": "gpt", "value": " \n"}), Reason.EMPTY_ANSWER),
    "empty question": (row({"from": "human", "value": ""}, A), Reason.EMPTY_QUESTION),
    "two questions": (row(Q, Q, A), Reason.ROLE_ORDER),
    "begins with an answer": (row(A, Q, A), Reason.ROLE_ORDER),
    "ends with a question": (row(Q, A, Q), Reason.ROLE_ORDER),
    "system within": (row(Q, A, {"from": "system", "value": "s"}, Q, A), Reason.ROLE_ORDER),
    "role of a narrator": (row(Q, {"from": "narrator", "value": "f"}, A), Reason.UNKNOWN_ROLE),
    "a tool that nobody calls": (row(Q, {"from": "function", "value": "f"}, A), Reason.ROLE_ORDER),
    "no role": (row(Q, {"value": "a"}), Reason.UNKNOWN_ROLE),
    "conversation as text": ({"id": "bad", "conversations": "Q A"}, Reason.WRONG_TYPE),
    "turn as text": (row("Q", "A"), Reason.WRONG_TYPE),
    "answer as number": (row(Q, {"from": "gpt", "value": 3}), Reason.WRONG_TYPE),
    "part of another type": (row({"role": "user", "content": [{"type": "smell", "smell": "v"}]}, A), Reason.WRONG_TYPE),
    "image as number": (row(MARKED, A, image=5), Reason.WRONG_TYPE),
    "more marks than images": (row(MARKED, MARKED | {"from": "gpt"}, image="good.jpg"), Reason.MARKS),
    "marks without an image": (row(MARKED, A), Reason.MARKS),
    "fewer marks than images": (row(MARKED, A, image=["good.jpg", "good.jpg"]), Reason.MARKS),
    "part without an image": (row({"role": "user", "content": [{"type": "image"}]}, A), Reason.MARKS),
    "image not there": (row(MARKED, A, image="gone.jpg"), Reason.IMAGE_MISSING),
    "image is a folder": (row(MARKED, A, image="."), Reason.IMAGE_MISSING),
    "image without a possible name": (row(MARKED, A, image="a\0b"), Reason.IMAGE_MISSING),
    "image on the net": (row(MARKED, A, image="https://example.org/a.jpg"), Reason.IMAGE_REMOTE),
    "image is text": (row(MARKED, A, image="text.jpg"), Reason.IMAGE_BROKEN),
    "image is empty": (row(MARKED, A, image="empty.jpg"), Reason.IMAGE_BROKEN),
    "image too large to be true": (row(MARKED, A, image="bomb.png"), Reason.IMAGE_BROKEN),
    "bad base64": (row(MARKED, A, image="data:image/png;base64,%%%"), Reason.IMAGE_BROKEN),
    "data URI as text": (row(MARKED, A, image="data:image/svg+xml,<svg/>"), Reason.IMAGE_BROKEN),
    "icon": (row(MARKED, A, image="icon.ico"), Reason.IMAGE_FORMAT),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "good.jpg").write_bytes(picture(0))
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "icon.ico").write_bytes(picture(0, "ICO"))
    (tmp_path / "bomb.png").write_bytes(claim_size(picture(0, "PNG"), 20000))
    return tmp_path


def claim_size(png: bytes, side: int) -> bytes:
    """A PNG whose header promises more pixels than there are."""
    header = b"IHDR" + struct.pack(">II", side, side) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


def write_lines(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


GOOD = row(MARKED, A, image="good.jpg")


def test_every_kind_is_skipped_with_its_reason(place: Path) -> None:
    """Each between good rows, which all come out."""
    rows = [part for bad, _ in BAD.values() for part in (GOOD, bad)]
    result = make(write_lines(place / "rows.jsonl", *rows), place / "out", max_skip_rate=1.0)
    lines = [json.loads(line) for line in (place / "out" / "skipped.jsonl").read_text().splitlines()]
    found = {name: line["reason"] for name, line in zip(BAD, lines, strict=True)}
    assert found == {name: reason.value for name, (_, reason) in BAD.items()}
    assert [line["index"] for line in lines] == list(range(1, 2 * len(BAD), 2))
    assert {line["file"] for line in lines} == {"rows.jsonl"} and all(line["detail"] for line in lines)
    assert {line["id"] for line in lines[4:]} == {"bad"}
    samples = read_back(place / "out")
    assert [s["source"]["index"] for s in samples] == list(range(0, 2 * len(BAD), 2))
    assert result.counts.reasons.total() == len(BAD) == result.counts.skipped
    assert result.counts.reasons[Reason.ROLE_ORDER.value] == 5
    assert result.counts.roles == {"'narrator'": 1, "None": 1}
    assert result.counts.conversations == len(BAD) == result.counts.images


def test_a_broken_row_of_a_list_is_skipped_too(place: Path) -> None:
    good = json.dumps(GOOD).encode()
    (place / "rows.json").write_bytes(b"[" + b", ".join([good, BAD["Latin-1"][0], good]) + b"]")
    make(place / "rows.json", place / "out", max_skip_rate=0.5)
    assert len(read_back(place / "out")) == 2


def test_whole_pictures_are_checked_only_on_request(place: Path) -> None:
    (place / "half.jpg").write_bytes(picture(1, size=(300, 300))[:-900])
    source = write_lines(place / "rows.jsonl", row(MARKED, A, image="half.jpg"), GOOD)
    assert make(source, place / "header").counts.skipped == 0
    checked = make(source, place / "whole", Options(check_images=True), max_skip_rate=1.0)
    assert checked.counts.reasons == {Reason.IMAGE_BROKEN.value: 1}


def spoil(change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        source = cases.write_triples(folder, vqa_cases(3))
        change(source)
        return source

    return write


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: (s / "001.txt").unlink(), Reason.NO_ANSWER),
        (lambda s: (s / "001.json").unlink(), Reason.NO_CONVERSATION),
        (lambda s: (s / "001.json").write_text("{}"), Reason.NO_CONVERSATION),
        (lambda s: (s / "001.json").write_text("["), Reason.NOT_JSON),
        (lambda s: (s / "001.txt").write_bytes(b"\xff"), Reason.NOT_UTF8),
        (lambda s: (s / "001.jpg").write_bytes(b"x"), Reason.IMAGE_BROKEN),
        (lambda s: (s / "001.jpg").unlink(), Reason.IMAGE_MISSING),
    ],
)
def test_triples(change: Callable[[Path], Any], reason: Reason, tmp_path: Path) -> None:
    """A triple that cannot be used is left out with its reason, and the others are kept."""
    result = make(spoil(change)(tmp_path), tmp_path / "out", max_skip_rate=0.5)
    assert result.counts.reasons == {reason.value: 1}
    assert contents(tmp_path / "out") == [vqa_cases(3)[i].content for i in (0, 2)]
    if reason is Reason.IMAGE_MISSING:  # the shards are there, but not complete
        assert make(spoil(change)(tmp_path / "again"), tmp_path / "stopped").finished is False
        with pytest.raises(DataError, match="`prepare` has not completed it; run its command again"):
            check_dataset(tmp_path / "stopped")


def test_triples_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative source and files with a byte order mark are read."""
    source = cases.write_triples(tmp_path, vqa_cases(3))
    for file in (source / "001.json", source / "001.txt"):
        file.write_bytes(BOM + file.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert make(source.relative_to(tmp_path), Path("out")).counts.skipped == 0
    assert contents(tmp_path / "out") == [case.content for case in vqa_cases(3)]


def test_a_cut_tar_is_an_error(tmp_path: Path) -> None:
    source = cases.write_tars(tmp_path, vqa_cases(6))
    whole = (source / "1.tar").read_bytes()
    with tarfile.open(source / "1.tar") as tar:
        last = tar.getmembers()[-2]
    (source / "1.tar").write_bytes(whole[: last.offset_data + 1])
    with pytest.raises(DataError, match=r"1\.tar is broken near byte"):
        make(source, tmp_path / "out")


def test_a_picture_without_any_mark_goes_first(place: Path) -> None:
    source = write_lines(place / "rows.jsonl", row({"from": "system", "value": "S"}, Q, A, image=["good.jpg"] * 2))
    make(source, place / "out")
    assert read_back(place / "out")[0]["messages"][1]["content"] == "<image>\n<image>\nWhat?"


def test_too_many_skipped_rows_end_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dataset must not be trained on by mistake, and is finished at once when the user accepts the rate."""
    source = write_lines(place / "rows.jsonl", *[GOOD] * 30, row(Q), BAD["image not there"][0])
    command = ["prepare", str(source), "--out", str(place / "out"), "--num-workers", "0"]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "2 of 32 rows skipped (6.25%, --max-skip-rate is 1.00%)" in told
    assert "rows.jsonl, row 30 (bad): no assistant turn" in told and "gone.jpg" in told
    with pytest.raises(DataError, match="has not completed it"):
        check_dataset(place / "out")
    before = (place / "out" / "000000.tar").stat().st_mtime_ns
    assert main([*command, "--max-skip-rate", "0.07"]) == 0
    assert check_dataset(place / "out") == [place / "out"]
    assert (place / "out" / "000000.tar").stat().st_mtime_ns == before
    assert main(command) == 2 and not (place / "out" / ".nv-meta").exists()


def test_nothing_left(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = make(write_lines(place / "rows.jsonl", row(Q), row(Q)), place / "out", max_skip_rate=1.0)
    assert not result.finished and result.num_shards == 0
    command = ["prepare", str(place / "rows.jsonl"), "--out", str(place / "out"), "--max-skip-rate", "1"]
    command += ["--samples-per-shard", "4", "--keep-order"]
    assert main(command) == 2 and "None became a sample" in capsys.readouterr().err
    with pytest.raises(DataError, match="there are no rows"):
        make(write_lines(place / "none.jsonl"), place / "none")


def test_a_folder_that_cannot_be_made_is_one_message(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(place / "rows.jsonl", *[GOOD] * 3)
    (place / "file").touch()
    assert main(["prepare", str(source), "--out", str(place / "file" / "out"), "--num-workers", "0"]) == 2
    assert "out cannot be written: [Errno 20] Not a directory" in capsys.readouterr().err
