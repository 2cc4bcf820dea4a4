"""Data that would take all memory or time, or wait forever: a counted skip or one message each, and soon."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from llava_mcore.cli import prepare as prepare_app
from llava_mcore.config.sections.data import DataConfig, Limits
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.storage.dataset_path import num_names
from llava_mcore.errors import ConfigError, DataError, LlavaMcoreError
from llava_mcore.templates.bounded import check_bounds
from tests.helpers.bad_data_makers import (
    ANSWERED,
    ASKED,
    FAULTY,
    NUM_SAMPLES,
    changed,
    good,
    index,
    messages,
    one_sample,
    picture,
    pictured,
    rewritten,
    write_tar,
)
from tests.unit.check_data.test_bad_data_table import examine, said

pytest_plugins = ("tests.helpers.llava_fixtures",)

TALK: dict[str, Any] = messages(ASKED, ANSWERED)
TALK_ONLY: dict[str, Any] = messages(("user", "q"), ANSWERED)
DEEP = "[" * 15_000
SMALL = Limits(sample_bytes=20_000, text_chars=500, image_pixels=10_000)


@pytest.fixture(scope="module")
def assets(hf: Path) -> Assets:
    return load_assets(hf, limits=SMALL)


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is so large."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def eps() -> bytes:
    """An image that Pillow would hand to Ghostscript."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "EPS")
    return buffer.getvalue()


# -- shards, in training and in check --------------------------------------------------------------------------------

SAMPLES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nested json": (one_sample({"json": b'{"messages": ' + DEEP.encode()}), "cannot be decoded"),
    "a long answer": (
        one_sample({"json": messages(ASKED, ("assistant", "a" * 600))}),
        "621 characters; the limit is 500",
    ),
    "many pixels": (pictured(bomb(200, 200), "0.png"), "200 x 200 pixels; the limit is 10000"),
    "more pixels than Pillow decodes": (pictured(bomb(60_000, 60_000), "0.png"), "pixels"),
    "a large JPEG": (pictured(picture(size=(300, 300))), "300 x 300 pixels; the limit is 10000"),
    "a large sample": (one_sample({"x.bin": bytes(30_000)}), r"the sample has \d+ bytes; the limit is 20000"),
    "a program instead of an image": (pictured(eps()), "no known format"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_left_out(name: str, assets: Assets, tmp_path: Path) -> None:
    make, reason = SAMPLES[name]
    path = make(tmp_path)
    data = DataConfig(
        path=path,
        seq_length=512,
        num_workers=0,
        shuffle_buffer_size=0,
        num_streams=1,
        max_sample_bytes=SMALL.sample_bytes,
        max_text_chars=SMALL.text_chars,
        max_image_pixels=SMALL.image_pixels,
    )
    loader = TrainLoader(data, assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
    skipped = [skip for _ in range(4) for skip in next(loader).skipped]
    assert skipped and "sample 000002" in skipped[0].where
    report = examine(path, assets, "--full")
    assert report.tally.num_left_out == 1
    for text in (skipped[0].reason, report.tally.problems("left out")[0].reason):
        assert re.search(reason, text), text


def fifo(name: str) -> Callable[[Path], Path]:
    """A good dataset with a named pipe in the place of one of its files."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return changed(change)


def device(name: str) -> Callable[[Path], Path]:
    """The same with a link to a file without end."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")

    return changed(change)


META = (".nv-meta/.info.json", ".nv-meta/split.yaml", ".nv-meta/dataset.yaml", ".nv-meta/index.uuid")
FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    **{
        f"pipe {name}": (fifo(name), name.removeprefix(".nv-meta/"))
        for name in ("000001.tar", "000001.tar.idx", *META[:3])
    },
    **{
        f"device {name}": (device(name), name.removeprefix(".nv-meta/"))
        for name in ("000001.tar", "000001.tar.idx", *META[:3])
    },
    **{f"nested {name}": (rewritten(name, '{"a": ' + DEEP), ".nv-meta") for name in META[:3]},
    "a billion shards": (
        rewritten(".nv-meta/split.yaml", "split_parts: {train: ['{0..999999999}.tar']}\n"),
        "1000000000 shards",
    ),
    "alternatives of alternatives": (
        rewritten(".nv-meta/split.yaml", "split_parts: {train: ['" + "{a,b}" * 40 + "']}\n"),
        "1099511627776 shards",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_refused(name: str, assets: Assets, tmp_path: Path) -> None:
    make, reason = FILES[name]
    path = make(tmp_path)
    with pytest.raises(DataError, match=reason):
        TrainLoader(DataConfig(path=path, num_workers=0), assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
    report = examine(path, assets)
    assert report.stop and reason in said(report)


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("a.tar", 1), ("{0..9}.tar", 10), ("{09..00}", 10), ("{a,b}/{0..2}", 6), ("{a,{b,c}}", 4), ("{}{", 1)],
)
def test_names_of_a_pattern_are_never_more(pattern: str, number: int) -> None:
    assert num_names(pattern) == number


def stored(name: str) -> Callable[[Path], Path]:
    """Images in a folder beside the shards, of which the faulty sample names one that is none."""

    def make(folder: Path) -> Path:
        pictures = odd_files(folder / "pictures")
        samples = {
            f"{n:06d}": {"json": TALK | {"images": [name if n == FAULTY else "good.jpg"]}} for n in range(NUM_SAMPLES)
        }
        write_tar(folder / "data" / "000000.tar", samples)
        index(folder / "data")
        store = f"aux: {{images: 'filesystem://{pictures}'}}"
        (folder / "blend.yaml").write_text(
            f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {{path: ./data, {store}}}}}\n"
        )
        return folder / "blend.yaml"

    return make


@pytest.mark.parametrize("name", ["pipe.jpg", "zero.jpg", "holes.jpg"])
def test_pictures_beside_the_shards(name: str, assets: Assets, tmp_path: Path) -> None:
    """A reference to such a file is left out with a reason that names it, by training and by the check."""
    path = stored(name)(tmp_path)
    data = DataConfig(path=path, seq_length=512, num_workers=0, shuffle_buffer_size=0, num_streams=1)
    loader = TrainLoader(data, assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
    reasons = {skip.reason for _ in range(4) for skip in next(loader).skipped}
    assert len(reasons) == 1 and name in reasons.pop()
    assert examine(path, assets, "--full").tally.num_left_out == 1


def test_a_jsonl_of_somebody_else(assets: Assets, tmp_path: Path) -> None:
    """Its index is a stranger's as well: energon's own command refuses such lines."""
    good(tmp_path / "good")
    lines = [json.dumps(TALK_ONLY), '{"messages": ' + DEEP, json.dumps(TALK_ONLY), "\xff\0"]
    content, ends = b"", [0]
    for line in lines:
        content += line.encode("latin-1") + b"\n"
        ends.append(len(content))
    (tmp_path / "lines.jsonl").write_bytes(content)
    (tmp_path / "lines.jsonl.idx").write_bytes(b"".join(n.to_bytes(8, "little") for n in ends))
    (tmp_path / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {blend: "
        "[{weight: 1, path: ./good}, {weight: 1, path: ./lines.jsonl}]}}\n"
    )
    data = DataConfig(path=tmp_path / "blend.yaml", seq_length=512, num_workers=0, shuffle_buffer_size=0, num_streams=1)
    loader = TrainLoader(data, assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
    skipped = {skip.where for _ in range(12) for skip in next(loader).skipped}
    assert len(skipped) == 2
    assert examine(tmp_path / "blend.yaml", assets, "--full").tally.num_left_out == 2


# -- prepare ---------------------------------------------------------------------------------------------------------


def prepared(source: Path, out: Path, *flags: str) -> list[tuple[str, str]]:
    """Reason and detail of every row that was left out."""
    limits = ["--max-sample-bytes", "20000", "--max-text-chars", "500", "--max-image-pixels", "10000"]
    command = [
        str(source),
        "--out",
        str(out),
        "--num-workers",
        "0",
        "--max-skip-rate",
        "1",
        "--keep-order",
        *limits,
        *flags,
    ]
    assert prepare_app.main(command) == 0
    lines = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    return [(line["reason"], line["detail"]) for line in lines]


def odd_files(folder: Path) -> Path:
    """Images that are none."""
    folder.mkdir()
    (folder / "good.jpg").write_bytes(picture())
    os.mkfifo(folder / "pipe.jpg")
    (folder / "zero.jpg").symlink_to("/dev/zero")
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    (folder / "folder.jpg").mkdir()
    (folder / "bomb.png").write_bytes(bomb(30_000, 30_000))
    with (folder / "holes.jpg").open("wb") as file:
        file.truncate(1 << 40)
    return folder


ODD = {
    "pipe.jpg": ("image missing", "is a named pipe, not a regular file"),
    "zero.jpg": ("image missing", "is a device, not a regular file"),
    "loop.jpg": ("image missing", "Too many levels"),
    "folder.jpg": ("image missing", "is a folder, not a regular file"),
    "bomb.png": ("", "30000 x 30000|exceeds limit"),
    "holes.jpg": ("image missing", "has 1099511627776 bytes; the limit is 20000"),
}


def test_pictures_that_are_none(tmp_path: Path) -> None:
    folder = odd_files(tmp_path / "in")
    rows = [TALK | {"images": [name]} for name in ("good.jpg", *ODD)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = prepared(folder / "rows.jsonl", tmp_path / "out")
    assert len(found) == len(ODD)
    for (reason, detail), (wanted, text) in zip(found, ODD.values(), strict=True):
        assert wanted in reason
        assert re.search(text, detail), detail


def bad_rows() -> list[str]:
    """A good row, and rows that are too much."""
    long = messages(("user", "q"), ("assistant", "a" * 600))
    return [
        json.dumps(messages(("user", "q"), ("assistant", "a"))),
        json.dumps(long),
        json.dumps(long | {"more": "x" * 30_000}),
        json.dumps(messages(("user", "q"), ("assistant", "b"))),
    ]


LARGE = [("more than is allowed", "601 characters"), ("more than is allowed", "of more than 20000 bytes")]


def test_lines_and_lists(tmp_path: Path) -> None:
    """Rows that are too large or nested too deeply are left out, each with its reason."""
    rows = bad_rows()
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"messages": ' + "[" * 9_000]))
    (tmp_path / "rows.json").write_text("[" + ",\n".join(rows) + "]")
    nested = [("row is not a JSON object", "recursion")]
    for name, expected in (("rows.jsonl", LARGE + nested), ("rows.json", LARGE)):
        found = prepared(tmp_path / name, tmp_path / f"{name}.out")
        assert [reason for reason, _ in found] == [reason for reason, _ in expected]
        assert all(text in detail for (_, detail), (_, text) in zip(found, expected, strict=True)), found


def test_tables(tmp_path: Path) -> None:
    """Rows of Parquet and Arrow that are too large are left out, each with its reason."""
    rows = [json.loads(row) for row in bad_rows()]
    table = pa.table({"messages": [row["messages"] for row in rows], "image": [None, None, b"x" * 30_000, None]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with (tmp_path / "out.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    for name in ("rows.parquet", "out.arrow"):
        found = prepared(tmp_path / name, tmp_path / f"{name}.out")
        assert ("more than is allowed", "a row of more than 20000 bytes (--max-sample-bytes)") in found


def test_folders_of_parts(tmp_path: Path) -> None:
    """Pipes, devices, broken links and huge files are left out, each with its reason."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.json").write_text(json.dumps({"question": "q"}))
        (folder / f"{number}.txt").write_text("a")
        (folder / f"{number}.jpg").write_bytes(picture())
    for name in ("1.txt", "2.jpg", "3.txt", "4.json", "5.json"):
        (folder / name).unlink()
    os.mkfifo(folder / "1.txt")
    os.mkfifo(folder / "2.jpg")
    (folder / "3.txt").symlink_to("/dev/zero")
    (folder / "4.json").symlink_to("/nowhere")
    with (folder / "5.json").open("wb") as file:
        file.truncate(1 << 40)
    found = prepared(folder, tmp_path / "out")
    texts = [
        "1.txt is a named pipe",
        "2.jpg is a named pipe",
        "3.txt is a device",
        "No such file",
        "1099511627776 bytes",
    ]
    assert len(found) == len(texts) and all(text in detail for (_, detail), text in zip(found, texts, strict=True))


def test_names_in_other_encodings(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        for name, data in {
            "caf\udce9.json": b'{"question": "q"}',
            "caf\udce9.txt": b"a",
            "caf\udce9.jpg": picture(),
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert prepared(tmp_path / "in.tar", tmp_path / "out") == []


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.tar", "rows.arrow"])
def test_sources_that_are_no_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / name)
    assert prepare_app.main([str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
    assert f"{name} is a named pipe, not a regular file" in capsys.readouterr().err


LISTS = {
    "aliases": "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(12))
    + "sources: [{path: rows.jsonl, subflavors: {a: *a11}}]\n",
    "a list in itself": "sources: &a [*a]\n",
    "nested": "sources: " + "[" * 5000,
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_sources(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hostile list is refused with one message that names it."""
    (tmp_path / "list.yaml").write_text(LISTS[name])
    assert prepare_app.main([str(tmp_path / "list.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "list.yaml" in capsys.readouterr().err


# -- folders of models -----------------------------------------------------------------------------------------------

TEMPLATES = {  # name -> template, what the message says, and the seconds that it may take
    "a text times a number": ("{{ 'a' * 99999999999 }}", "memory", 60),
    "a text that doubles": (
        "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
        "memory",
        60,
    ),
    "a filter": ("{{ 'a'.ljust(9999999999) }}", "memory", 60),
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "more than 2 s",
        2,
    ),
    "a long text": ("{% for a in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "characters", 60),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_take_too_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, reason, seconds = TEMPLATES[name]
    monkeypatch.setattr("llava_mcore.templates.bounded.MOST_SECONDS", seconds)
    with pytest.raises(ConfigError, match=reason):
        check_bounds(template, "somewhere")


def test_a_template_whose_process_waits_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another thread had held a lock when the process was forked."""
    monkeypatch.setattr("llava_mcore.templates.bounded.LONGEST_WAIT", 0.3)
    monkeypatch.setattr("llava_mcore.templates.bounded._render_and_leave", lambda _: signal.pause())
    with pytest.raises(ConfigError, match=r"longer than 0\.3 s"):
        check_bounds("{{ 'a process that waits' }}", "somewhere")


def test_a_folder_whose_template_takes_too_much(hf: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", f"{hf}/.", tmp_path], check=True)
    for template, reason in (
        ("{{ 'a' * 99999999999 }}", "memory"),
        ("{% for a in range(9999999) %}{% endfor %}", "range"),
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(LlavaMcoreError, match=reason):
            load_assets(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"])
def test_folders_with_odd_files(name: str, hf: Path, tmp_path: Path) -> None:
    """A pipe, a device or deeply nested JSON in the place of a file is refused by name."""
    subprocess.run(["cp", "-r", f"{hf}/.", tmp_path], check=True)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} is a named pipe"):
        load_assets(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=f"{name} is a device"):
        load_assets(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text('{"a": ' + DEEP)
    with pytest.raises(DataError, match=str(tmp_path)):
        load_assets(tmp_path)


def test_code_of_a_folder_is_not_run(hf: Path, tmp_path: Path) -> None:
    """Asked at a terminal, transformers would wait for an answer; with trust_remote_code it would run it."""
    subprocess.run(["cp", "-r", f"{hf}/.", tmp_path], check=True)
    mark = tmp_path / "MARK"
    (tmp_path / "payload.py").write_text(f"open({str(mark)!r}, 'w')\nclass A: pass\n")
    for name, key in (
        ("tokenizer_config.json", "AutoTokenizer"),
        ("preprocessor_config.json", "AutoImageProcessor"),
        ("processor_config.json", "AutoProcessor"),
        ("config.json", "AutoConfig"),
    ):
        file = tmp_path / name
        settings = json.loads(file.read_text()) if file.exists() else {}
        settings["auto_map"] = {key: ["payload.A", "payload.A"] if key == "AutoTokenizer" else "payload.A"}
        if key == "AutoTokenizer":
            settings["tokenizer_class"] = "A"
        file.write_text(json.dumps(settings))
    script = (
        "import sys, pathlib\nfrom llava_mcore.data.encode.assets import load_assets\n"
        "load_assets(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run(
        [sys.executable, "-c", script, tmp_path], input=b"y\ny\ny\n", capture_output=True, check=False, timeout=300
    )
    assert not mark.exists()


def test_a_picture_of_another_format_is_no_picture() -> None:
    with pytest.raises(DataError, match="no known format"):
        decode_image(eps())
