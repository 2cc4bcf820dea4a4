"""Reading local shards directly gives what energon's reader gives, whatever the shard holds."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.structs import FilteredSample, ShardInfo

from llava_mcore.data.storage.shard_files import OFFSET
from llava_mcore.data.storage.shard_reader import ShardReader, plain_files

LONG = "a" * 120
SAMPLES: list[list[tuple[str, bytes]]] = [
    [("000.json", b"{}"), ("000.0.jpg", b"x" * 700)],
    [("001.json", b"")],
    [("folder/002.txt", b"y" * 512), ("folder/002.png", b"z")],
    [("003.json", b"1"), ("__meta__/003.txt", b"2")],
    [(f"{LONG}.json", b"3"), (f"{LONG}.jpg", b"4")],
    [(f"{'b' * 90}/{'c' * 60}.json", b"5")],
    [("名前.json", b"6"), ("名前.jpg", b"7")],
    [("no-extension", b"8"), ("007.txt", b"9"), ("007.txt", b"10")],
    [("008.json", b"11"), ("009.json", b"12")],
    [("010.skip", b"13"), ("010.json", b"14")],
    [("excluded.json", b"15")],
    [("__only__/x.json", b"16")],
]


def write(path: Path, kind: int) -> Path:
    """A shard of all samples with its index."""
    offsets = []
    with tarfile.open(path, "w", format=kind) as tar:
        for number, files in enumerate(SAMPLES):
            offsets.append(tar.offset)
            if number == 3:
                folder = tarfile.TarInfo("003/")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
            for name, data in files:
                # USTAR has no name of more than 100 letters without a folder.
                info = tarfile.TarInfo(name.replace(LONG, "a") if kind == tarfile.USTAR_FORMAT else name)
                info.size, info.mtime = len(data), 1234567890.5 if kind == tarfile.PAX_FORMAT else 7
                tar.addfile(info, io.BytesIO(data))
        offsets.append(tar.offset)
    path.with_suffix(".tar.idx").write_bytes(b"".join(map(OFFSET.pack, offsets)))
    return path


def readers(folder: Path, number: int = 1) -> tuple[ShardInfosITarReader, ShardReader]:
    shards = [ShardInfo(name=f"{i}.tar", path=EPath(folder / f"{i}.tar"), count=len(SAMPLES)) for i in range(number)]
    theirs = ShardInfosITarReader(
        EPath(folder),
        shards,
        part_filter=lambda part: part != "skip",
        sample_filter=lambda key: "excluded" not in key,
        itar_cache_size=2,
    )
    return theirs, ShardReader(theirs)


def outcome(reader: ShardInfosITarReader, number: int) -> FilteredSample | tuple[Any, str] | None:
    try:
        return reader[number]
    except (ValueError, IndexError, tarfile.TarError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_same_samples_and_errors(kind: int, tmp_path: Path) -> None:
    """Our reader gives Energon's samples and errors, in any order."""
    for shard in range(3):  # more than stay open
        write(tmp_path / f"{shard}.tar", kind)
    theirs, ours = readers(tmp_path, 3)
    order = [n * 7 % (3 * len(SAMPLES)) for n in range(3 * len(SAMPLES))]
    assert sorted(order) == list(range(3 * len(SAMPLES)))
    for number in order:
        found = outcome(ours, number)
        assert found == outcome(theirs, number), SAMPLES[number % len(SAMPLES)]
        if isinstance(found, dict):
            assert list(found) == list(theirs[number] or ())
    ours.close()
    theirs.close()


@pytest.mark.parametrize("place", [0, 100, 124, 148, 156, 345, 1024, 1100])
def test_the_same_where_a_header_is_damaged(place: int, tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    content[place] ^= 0x55
    path.write_bytes(content)
    theirs, ours = readers(tmp_path)
    assert outcome(ours, 0) == outcome(theirs, 0)


def test_the_same_where_a_shard_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", tarfile.USTAR_FORMAT)
    path.write_bytes(path.read_bytes()[:1500])
    theirs, ours = readers(tmp_path)
    assert outcome(ours, 0) == outcome(theirs, 0)
    path.with_suffix(".tar.idx").write_bytes(b"\0" * 8)
    theirs, ours = readers(tmp_path)
    assert outcome(ours, 1) == outcome(theirs, 1)


def test_plain_samples_take_the_short_way(tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", tarfile.USTAR_FORMAT)
    start, end = (OFFSET.unpack_from(path.with_suffix(".tar.idx").read_bytes(), 8 * n)[0] for n in (0, 1))
    assert plain_files(path.read_bytes()[start:end]) == SAMPLES[0]
