"""Shards whose members are links or devices: hard links are followed, everything else is left out and counted."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.structs import ShardInfo

from llava_mcore.cli import prepare as prepare_app
from llava_mcore.compat.energon.shards import forget_read_members
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.samples import Batch
from llava_mcore.data.storage.shard_reader import ShardReader
from llava_mcore.data.storage.tar_files import Link, TarIndex
from tests.helpers.bad_data_makers import ANSWERED, ASKED, index, messages, picture
from tests.unit.check_data.test_bad_data_table import examine

pytest_plugins = ("tests.helpers.llava_fixtures",)

TALK = messages(ASKED, ANSWERED)
KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
}


def read(path: Path, assets: Assets, number: int) -> list[Batch]:
    data = DataConfig(path=path, seq_length=256, num_workers=0, shuffle_buffer_size=0, num_streams=1, max_skip_rate=1)
    loader = TrainLoader(data, assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
    return [next(loader) for _ in range(number)]


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = "") -> None:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, target
    tar.addfile(info, io.BytesIO(data))


def linked(folder: Path, kind: bytes, target: str, *, first: bool, form: int = tarfile.GNU_FORMAT) -> Path:
    """Four samples, of which the third has a link for its image, before or after its json."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "000000.tar", "w", format=form) as tar:
        for number in range(4):
            key = f"{number:06d}"
            picture_of_it = (f"{key}.0.jpg", b"", kind, target) if number == 2 else (f"{key}.0.jpg", picture())
            for part in [picture_of_it, (f"{key}.json", json.dumps(TALK).encode())][:: 1 if first else -1]:
                add(tar, *part)
    return folder


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_hard_links_are_followed(first: bool, form: int, assets: Assets, tmp_path: Path) -> None:
    path = index(linked(tmp_path, tarfile.LNKTYPE, "000000.0.jpg", first=first, form=form))
    batches = read(path, assets, 4)
    assert {batch.sample_keys[0] for batch in batches} == {f"{n:06d}" for n in range(4)}
    assert not any(batch.skipped for batch in batches)
    assert all(torch.equal(batch.media["pixel_values"], batches[0].media["pixel_values"]) for batch in batches)
    report = examine(path, assets, "--full")
    assert not report.reasons_not_to_train and report.tally.images == {1: 4}


def test_what_gnu_tar_writes_for_files_of_one_inode(assets: Assets, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number:06d}.json").write_text(json.dumps(TALK))
        if number == 0:
            (tmp_path / "000000.0.jpg").write_bytes(picture())
        else:
            os.link(tmp_path / "000000.0.jpg", tmp_path / f"{number:06d}.0.jpg")
    (tmp_path / "shards").mkdir()
    names = sorted(file.name for file in tmp_path.iterdir() if file.is_file())
    subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "shards" / "000000.tar", *names], check=True)
    path = index(tmp_path / "shards")
    with tarfile.open(path / "000000.tar") as tar:
        assert sum(member.islnk() for member in tar) == 4
    report = examine(path, assets, "--full")
    assert report.tally.images == {1: 5}, report.tally.problems("left out")
    batches = read(path, assets, 5)
    assert [len(batch.media["pixel_values"]) for batch in batches] == [1] * 5


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("kind", "target", "reason"),
    [
        *((kind, "000000.0.jpg", f"it is {name}, which has no contents") for kind, name in KINDS.items()),
        (tarfile.LNKTYPE, "000003.0.jpg", "a hard link to '000003.0.jpg', which is not an earlier file"),
        (tarfile.LNKTYPE, "/etc/hostname", "a hard link to '/etc/hostname', which is not an earlier file"),
        (tarfile.LNKTYPE, "000002.0.jpg", "a hard link to '000002.0.jpg', which is not an earlier file"),
    ],
)
def test_everything_else_is_left_out(
    kind: bytes, target: str, reason: str, first: bool, assets: Assets, tmp_path: Path
) -> None:
    path = index(linked(tmp_path, kind, target, first=first))
    skipped = [skip for batch in read(path, assets, 4) for skip in batch.skipped]
    assert {skip.reason for skip in skipped} == {skipped[0].reason} and reason in skipped[0].reason
    assert "sample 000002" in skipped[0].where
    report = examine(path, assets, "--full")
    assert report.tally.num_left_out == 1 and report.tally.images == {1: 3}
    assert reason in report.tally.problems("left out")[0].reason


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("kind", "num_skipped"), [(tarfile.LNKTYPE, 0), (tarfile.SYMTYPE, 1), (tarfile.CHRTYPE, 1)])
def test_prepare_reads_tar_files_the_same_way(
    kind: bytes, num_skipped: int, first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked(tmp_path / "in", kind, "000000.0.jpg", first=first)
    flags = ["--max-skip-rate", "0.5", "--num-workers", "0"]
    assert prepare_app.main([str(tmp_path / "in" / "000000.tar"), "--out", str(tmp_path / "out"), *flags]) == 0
    skipped = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in skipped] == ["image missing"] * num_skipped
    assert all("000002.0.jpg: it is a" in line["detail"] for line in skipped)
    with tarfile.open(tmp_path / "out" / "000000.tar") as tar:
        pictures = {m.name: tar.extractfile(m).read() for m in tar if m.name.endswith(".jpg")}  # type: ignore[union-attr]
    assert len(pictures) == 4 - num_skipped and set(pictures.values()) == {picture()}


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A header with any text as size."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157] = size.ljust(12, b"\0"), kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_a_link_is_to_the_last_file_of_its_name_before_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for data in (b"first", b"second"):
            add(tar, "a.txt", data)
        add(tar, "b.txt", kind=tarfile.LNKTYPE, target="a.txt")
        add(tar, "a.txt", b"third")
    offset = 4 * tarfile.BLOCKSIZE  # after two headers and two blocks of text
    index_ = TarIndex(lambda: (tmp_path / "0.tar").open("rb"))
    assert index_.contents(Link(tarfile.LNKTYPE, "a.txt", offset), 100) == b"second"
    assert index_.contents(Link(tarfile.LNKTYPE, "b.txt", offset + 1), 100) == b"second", "a link to a link"


NEGATIVE = b"\xff" * 11 + b"\0"
"""-256 in the form that GNU tar has for large numbers."""


@pytest.mark.parametrize(
    "block",
    {
        "a size below zero": header("a.json", b"-0000001000") + bytes(1024),
        "a size below zero in binary": header("a.json", NEGATIVE) + bytes(1024),
        "a long name of no end": header("././@LongLink", b"77777777777", b"L") + bytes(1024),
        "a long name of less than nothing": header("././@LongLink", NEGATIVE, b"L") + bytes(1024),
        "many headers for one member": header("././@LongLink", b"0", b"L") * 3000 + bytes(1024),
        "a header of options that are none": header("x", b"1000", b"x")
        + b"99999999999 size=7\n".ljust(512)
        + bytes(512),
        "a sparse file of a terabyte": header("a.json", b"1000", b"S") + bytes(1024),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("before", [0, 1])
def test_headers_that_lie_end(block: tuple[str, bytes], before: int, tmp_path: Path) -> None:
    whole = header("0.json", b"2") + b"{}".ljust(512, b"\0")
    (tmp_path / "0.tar").write_bytes(whole * before + block[1])
    ends = [0, *[len(whole)] * before, len(whole) * before + len(block[1])]
    (tmp_path / "0.tar.idx").write_bytes(b"".join(n.to_bytes(8, "little") for n in ends))
    shards = [ShardInfo(name="0.tar", path=EPath(tmp_path / "0.tar"), count=before + 1)]
    reader = ShardReader(ShardInfosITarReader(EPath(tmp_path), shards))
    forget_read_members()
    with pytest.raises((ValueError, tarfile.TarError)):
        reader[before]


def test_an_index_that_lies_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(header("0.json", b"2") + b"{}".ljust(512, b"\0") + bytes(1024))
    for ends in ([0, 1 << 62], [1 << 40, 1 << 41], [1024, 0]):
        (tmp_path / "0.tar.idx").write_bytes(b"".join(n.to_bytes(8, "little") for n in ends))
        shards = [ShardInfo(name="0.tar", path=EPath(tmp_path / "0.tar"), count=1)]
        reader = ShardReader(ShardInfosITarReader(EPath(tmp_path), shards), most_bytes=1 << 63)
        with pytest.raises((ValueError, tarfile.TarError)):
            reader[0]
        reader.close()
