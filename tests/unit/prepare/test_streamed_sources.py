"""Files at a URL that are read where they are: the shards of local copies, few bytes, broken connections, changes."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from llava_mcore.__main__ import main
from llava_mcore.data.storage.dataset_path import SCRATCH
from llava_mcore.prepare.journal import Journal
from llava_mcore.prepare.sources import file_systems, parquet, remote_file
from llava_mcore.prepare.sources.file_systems import file_system
from tests.helpers.hub_server import REPO, Hub
from tests.helpers.prepare_cases import picture, shard_bytes

pytest_plugins = ("tests.helpers.hub_server",)

NUM_ROWS, BLOCK = 22, 1 << 14
HF = f"hf://datasets/{REPO}/data"
KINDS = ("parquet", "jsonl")


def row(index: int) -> dict[str, Any]:
    """A row of some 60 KB, so that blocks are smaller than a row."""
    noise = np.random.default_rng(index).integers(0, 256, 60_000, dtype=np.uint8).tobytes()
    return {"question": f"Which is image {index}?", "answer": f"It is {index}.", "image": picture(index) + noise}


def files_of(kind: str) -> dict[str, bytes]:
    """Two files of the wanted part, whose ends fit no shard, and one of another part."""
    parts = {"train-00000-of-00002": range(13), "train-00001-of-00002": range(13, NUM_ROWS), "test": range(2)}
    return {f"data/{name}.{kind}": _file(kind, [*map(row, rows)]) for name, rows in parts.items()}


def _file(kind: str, rows: Sequence[dict[str, Any]]) -> bytes:
    if kind == "parquet":
        sink = pa.BufferOutputStream()
        extra = pa.Table.from_pylist([{**row, "unused": 1} for row in rows])
        pq.write_table(extra, sink, row_group_size=5, compression="none")
        return sink.getvalue().to_pybytes()
    coded = [{**row, "image": base64.b64encode(row["image"]).decode()} for row in rows]
    lines = "\n\n".join(json.dumps(row) for row in coded[:2]) + "\n" + "\n".join(json.dumps(row) for row in coded[2:])
    return lines.encode()


def command(sources: str | list[str], out: Path, *flags: str, workers: int = 0) -> list[str]:
    common = ["--samples-per-shard", "4", "--num-workers", str(workers), "--out", str(out)]
    return ["prepare", *([sources] if isinstance(sources, str) else sources), *common, *(flags or ("--keep-order",))]


def web(hub: Hub, kind: str) -> list[str]:
    """The two files as a web server has them."""
    root = f"http://127.0.0.1:{hub.server_address[1]}/datasets/{REPO}/resolve/main/data"
    return [f"{root}/train-0000{i}-of-00002.{kind}" for i in range(2)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(hub: Hub, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub.files |= {**files_of(kind), "README.md": b"text"}
    for module in (remote_file, parquet):
        monkeypatch.setattr(module, "REMOTE_BLOCK", BLOCK)
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(remote_file, "FIRST_WAIT", 0.0)
    yield hub


@pytest.fixture
def local(tmp_path: Path, kind: str) -> Path:
    for name, data in files_of(kind).items():
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(data)
    return tmp_path / "local" / "data"


def leftovers(out: Path) -> list[str]:
    """Copies of source files and rows that are still there."""
    return [str(p) for p in (out / SCRATCH).rglob("*") if p.name.endswith((".part", ".arrow")) or "source" in p.parts]


@pytest.mark.parametrize("flags", [("--keep-order",), ("--keep-order", "--max-rows", "15"), ("--shuffle-seed", "3")])
def test_shards_of_a_url_are_those_of_a_copy(served: Hub, local: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """By hf:// and http://, in this process and in others, bit for bit; and nothing of the source is left."""
    assert main(command(str(local), tmp_path / "whole", *flags)) == 0
    expected = shard_bytes(tmp_path / "whole")
    assert len(expected) == (4 if "--max-rows" in flags else 6)
    assert main(command(HF, tmp_path / "hf", *flags, workers=2)) == 0
    assert shard_bytes(tmp_path / "hf") == expected
    fetched = "--shuffle-seed" in flags and "jsonl" in str(sorted(served.files))
    assert bool(leftovers(tmp_path / "hf")) == fetched
    served.fetched.clear()
    assert main(command(HF, tmp_path / "hf", *flags, workers=2)) == 0, "the same again"
    assert served.sent and len(served.fetched) <= 8, "of a finished dataset, only the ends of files are read"


def test_the_first_shard_is_written_before_much_is_read(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    add = Journal.add
    monkeypatch.setattr(Journal, "add", lambda self, report: (sent.append(served.sent), add(self, report))[1])
    assert main(command(HF, tmp_path / "out")) == 0
    size = sum(len(data) for name, data in served.files.items() if "train" in name)
    assert sent[0] < 0.4 * size and sent[-1] < 1.25 * size, (sent, size)
    served.sent = 0
    assert main(command(HF, tmp_path / "few", "--keep-order", "--max-rows", "3")) == 0
    assert served.sent < 0.35 * size, (served.sent, size)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_connection(
    served: Hub, local: Path, kind: str, tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A range is asked for again; then one message names the file; a run that continues reads the rest alone."""
    pytest.importorskip("aiohttp")
    urls = web(served, kind)
    assert main(command(str(local), tmp_path / "whole")) == 0
    expected, out = shard_bytes(tmp_path / "whole"), tmp_path / "out"
    second = f"data/train-00001-of-00002.{kind}"
    middle = len(served.files[second]) // 2
    served.breaks[second] = (middle, 1)
    assert main(command(urls, tmp_path / "once")) == 0
    assert shard_bytes(tmp_path / "once") == expected
    served.breaks[second] = (middle, 1000)
    capsys.readouterr()
    assert main(command(urls, out, workers=workers)) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1 and "Traceback" not in message
    assert f"{urls[1]} cannot be read" in message and "run the same command again" in message
    kept = shard_bytes(out)
    assert len(kept) >= 3 and not (out / ".nv-meta").exists()
    served.breaks.clear()
    served.sent = 0
    assert main(command(urls, out, workers=workers)) == 0
    assert shard_bytes(out) == expected and not leftovers(out)
    size = sum(len(data) for name, data in served.files.items() if "train" in name)
    assert served.sent < 0.7 * size, (served.sent, size)


def test_files_that_change(served: Hub, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between two runs, and while a run reads them."""
    name = f"data/train-00000-of-00002.{kind}"
    assert main(command(HF, tmp_path / "out")) == 0
    before, served.files[name] = served.files[name], _file(kind, [row(i + 1) for i in range(13)])
    capsys.readouterr()
    assert main(command(HF, tmp_path / "out")) == 2
    assert f"train-00000-of-00002.{kind} has changed" in capsys.readouterr().err
    served.files[name] = before
    add = Journal.add

    def change(self: Journal, report: Any) -> None:
        served.files[name] = before[:-100] + before[-100:].replace(b"a", b"b") + b" "
        add(self, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", change)
        assert main(command(HF, tmp_path / "moving")) == 2
    assert f"{name.partition('/')[2]} has changed while it was read" in capsys.readouterr().err


def test_http_and_servers_that_send_no_ranges(served: Hub, local: Path, kind: str, tmp_path: Path) -> None:
    """Where a part of a file cannot be had, the whole is fetched first."""
    pytest.importorskip("aiohttp")
    name = f"data/train-00000-of-00002.{kind}"
    assert main(command(str(local / Path(name).name), tmp_path / "whole")) == 0
    url = web(served, kind)[0]
    assert main(command(url, tmp_path / "ranges")) == 0 and not leftovers(tmp_path / "ranges")
    served.takes_ranges = False
    fsspec.filesystem("http").invalidate_cache()
    assert main(command(url, tmp_path / "fetched")) == 0 and leftovers(tmp_path / "fetched")
    expected = shard_bytes(tmp_path / "whole")
    assert shard_bytes(tmp_path / "ranges") == shard_bytes(tmp_path / "fetched") == expected


def test_files_in_memory(local: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes need no way to the file system; a source without rows, and one shard for two parts, are refused."""
    store = fsspec.filesystem("memory")
    for name, data in files_of(kind).items():
        store.pipe_file(f"/{kind}/{name}", data)
    store.pipe_file(f"/none/a.{kind}", _file(kind, [row(0)])[:0] if kind == "jsonl" else _empty_table())
    url = f"memory://{kind}/data"
    assert main(command(url, tmp_path / "out", workers=2)) == 0
    assert main(command(str(local), tmp_path / "whole")) == 0
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    capsys.readouterr()
    assert main(command(f"memory://none/a.{kind}", tmp_path / "none")) == 2
    assert "there are no rows" in capsys.readouterr().err
    assert main([*command(url, tmp_path / "one"), "--samples-per-shard", "100", "--val-ratio", "0.5"]) == 2
    assert "1 shard cannot be split by --val-ratio 0.5" in capsys.readouterr().err


def _empty_table() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([row(0)]).slice(0, 0), sink)
    return sink.getvalue().to_pybytes()


def test_file_systems_outlive_forks() -> None:
    """A forked process, such as the one that tries a chat template, drops fsspec's cache. hdfs-native would wait there
    for threads that only the parent has."""

    class Ended(MemoryFileSystem):
        def __del__(self) -> None:
            os.write(write, b"ended")

    read, write = os.pipe()
    os.set_blocking(read, False)
    fsspec.register_implementation("ended", Ended, clobber=True)
    file_system("ended://folder")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    Ended.clear_instance_cache()
    with pytest.raises(BlockingIOError):
        os.read(read, 5)
    file_systems.OPENED.clear()
    assert os.read(read, 5) == b"ended"
