"""Files and whole datasets with one fault each."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.energon.flavors.jsonl.jsonl_prepare import JsonlPreparator

from tests.helpers.bad_data_makers import (
    ANSWERED,
    ASKED,
    GOOD,
    NUM_SAMPLES,
    BadData,
    changed,
    good,
    index,
    messages,
    removed,
    rewritten,
    write_tar,
)
from tests.helpers.bad_data_samples import UNDECODABLE, old

BLEND = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"

# -- files, after the data were prepared -----------------------------------------------------------------------------


def cut(folder: Path) -> None:
    tar = folder / "000001.tar"
    tar.write_bytes(tar.read_bytes()[:5000])


def replaced(folder: Path) -> None:
    """Another file of nearly the same size under the same name."""
    other = {f"9{i:05d}": GOOD | {"json": messages(ASKED, ("assistant", "ramp " * 200))} for i in range(NUM_SAMPLES)}
    write_tar(folder / "000001.tar", other)


def zipped(folder: Path) -> None:
    tar = folder / "000001.tar"
    tar.write_bytes(gzip.compress(tar.read_bytes()))


def overwritten_header(folder: Path) -> None:
    """The second sample's first header, which neither the beginning nor the end of the tar shows."""
    tar = folder / "000001.tar"
    data = bytearray(tar.read_bytes())
    start = int.from_bytes((folder / "000001.tar.idx").read_bytes()[8:16], "little")
    data[start : start + 512] = b"\xaa" * 512
    tar.write_bytes(bytes(data))


def other_index(folder: Path) -> None:
    (folder / "000001.tar.idx").write_bytes((folder / "000001.tar.idx").read_bytes()[:-8])


def wrong_split(parts: Any) -> Callable[[Path], Path]:
    return rewritten(".nv-meta/split.yaml", json.dumps({"split_parts": parts, "exclude": []}))


def listed_twice(folder: Path) -> None:
    parts = {"train": ["000000.tar", "000000.tar"], "val": ["000000.tar"], "test": []}
    (folder / ".nv-meta" / "split.yaml").write_text(json.dumps({"split_parts": parts, "exclude": []}))


def excluded(folder: Path) -> None:
    split = {"split_parts": {"train": ["00000{0..1}.tar"]}, "exclude": ["00000{0..1}.tar"]}
    (folder / ".nv-meta" / "split.yaml").write_text(json.dumps(split))


def foreign_sqlite(folder: Path) -> None:
    good(folder / "other", shards=1)
    shutil.move(folder / "other" / ".nv-meta" / "index.sqlite", folder / ".nv-meta" / "index.sqlite")
    shutil.rmtree(folder / "other")


AGAIN = "copy the file again, or prepare the dataset again"
TEXT_TYPE = "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
FILES = [
    BadData("tar cut", changed(cut), "stop", rf"000001\.tar has 5000 bytes, but its index needs \d+.*{AGAIN}", "start"),
    BadData("tar empty", rewritten("000001.tar", b""), "stop", r"000001\.tar has 0 bytes, but its index", "start"),
    BadData("tar deleted", removed("000001.tar"), "stop", r"000001\.tar is missing, but \.nv-meta lists it", "start"),
    BadData("tar replaced", changed(replaced), "stop", r"000001\.tar is not the file that was indexed", "start"),
    BadData("tar zipped", changed(zipped), "stop", r"000001\.tar is compressed \(gzip\)", "start"),
    BadData("header overwritten", changed(overwritten_header), "stop", r"cannot be read.*"),
    BadData("tar.idx deleted", removed("000001.tar.idx"), "stop", r"000001\.tar\.idx cannot be read", "start"),
    BadData("tar.idx shorter", changed(other_index), "stop", r"000001\.tar\.idx lists 3 samples, .*json 4", "start"),
    BadData("no .nv-meta", changed(lambda d: shutil.rmtree(d / ".nv-meta")), "stop", r"has no \.nv-meta", "start"),
    BadData("no index.sqlite", removed(".nv-meta/index.sqlite"), "stop", r"not complete \(index\.sqlite mis", "start"),
    BadData("index.sqlite garbage", rewritten(".nv-meta/index.sqlite", b"garbage" * 99), "fine", "not a database"),
    BadData("index.sqlite of other data", changed(foreign_sqlite), "fine", "does not belong to these shards: 000001"),
    BadData("no .info.json", removed(".nv-meta/.info.json"), "stop", r"\.info\.json", "start"),
    BadData(".info.json garbage", rewritten(".nv-meta/.info.json", "{"), "stop", r"\.info\.json: not valid", "start"),
    BadData("no dataset.yaml", removed(".nv-meta/dataset.yaml"), "stop", r"not complete \(dataset\.yaml", "start"),
    BadData("dataset.yaml garbage", rewritten(".nv-meta/dataset.yaml", "a: [b"), "stop", r"dataset\.yaml", "start"),
    BadData(
        "unknown class",
        rewritten(".nv-meta/dataset.yaml", "sample_type: {__module__: nowhere, __class__: X}\nfield_map: {}\n"),
        "stop",
        r"dataset\.yaml.*nowhere",
        "start",
    ),
    BadData("text type", old({}, TEXT_TYPE), "stop", "TextSample cannot be trained on"),
    BadData("split.yaml garbage", rewritten(".nv-meta/split.yaml", "a: [b"), "stop", r"split\.yaml", "start"),
    BadData("split.yaml a list", rewritten(".nv-meta/split.yaml", "[1]"), "stop", r"split\.yaml", "start"),
    BadData("train empty", wrong_split({"train": [], "val": []}), "stop", "no shards in its 'train' part", "start"),
    BadData("no train", wrong_split({"val": ["000000.tar"]}), "stop", "no shards in its 'train' part", "start"),
    BadData("unknown shard", wrong_split({"train": ["7.tar"]}), "stop", r"'7\.tar' is in split\.yaml, but", "start"),
    BadData("all shards excluded", changed(excluded), "stop", "No shards found in split part 'train'", "start"),
    BadData("shard listed twice", changed(listed_twice), "fine", r"listed more than once in 'train'(?s:.*)'val'"),
    BadData(
        "shard added later",
        changed(lambda d: write_tar(d / "000009.tar", {"900000": GOOD})),
        "fine",
        r"000009\.tar not in the index",
    ),
]

# -- whole datasets and blends ---------------------------------------------------------------------------------------


def blended(*entries: str, text: str | None = None) -> Callable[[Path], Path]:
    """A blend of `good` and other entries, or any text under its name."""

    def make(folder: Path) -> Path:
        good(folder / "good")
        lines = "".join(f"      - weight: 1\n        path: ./{name}\n" for name in ("good", *entries))
        (folder / "blend.yaml").write_text(BLEND + lines if text is None else text, encoding="utf-8")
        return folder / "blend.yaml"

    return make


def lines_in_blend(*lines: str, later: str = "") -> Callable[[Path], Path]:
    """A blend with an indexed .jsonl, to which text is added later."""

    def make(folder: Path) -> Path:
        path = blended("lines.jsonl")(folder)
        file = folder / "lines.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        JsonlPreparator.prepare_dataset(file)
        with file.open("a") as out:
            out.write(later)
        return path

    return make


def refused(write: Callable[[Path], Any]) -> Callable[[Path], Path]:
    """Shards that energon does not prepare: it leaves half of .nv-meta."""

    def make(folder: Path) -> Path:
        good(folder)
        shutil.rmtree(folder / ".nv-meta")
        write(folder)
        with contextlib.suppress(AssertionError, SystemExit, RuntimeError):
            index(folder)
            raise ValueError("energon has prepared shards that it should refuse")
        return folder

    return make


def cut_copy(folder: Path) -> None:
    tar = write_tar(folder / "000001.tar", {f"1{i:05d}": GOOD for i in range(NUM_SAMPLES)})
    tar.write_bytes(tar.read_bytes()[:5000])


def all_broken(folder: Path) -> Path:
    write_tar(folder / "000000.tar", {f"{i:06d}": GOOD | {"0.jpg": b"nothing"} for i in range(NUM_SAMPLES)})
    return index(folder)


def few(folder: Path) -> Path:
    write_tar(folder / "000000.tar", {"000000": GOOD})
    return index(folder)


def cut_at_a_file(folder: Path) -> Path:
    """A tar that was cut between two samples before it was prepared."""
    tar = write_tar(folder / "000000.tar", {f"{i:06d}": GOOD for i in range(NUM_SAMPLES)})
    with tarfile.open(tar) as file:
        end = next(member.offset for member in file if member.name.startswith("000003"))
    tar.write_bytes(tar.read_bytes()[:end])
    return index(folder)


def plain_file(folder: Path) -> Path:
    (folder / "data.txt").write_text("no data")
    return folder / "data.txt"


def bare_jsonl(folder: Path) -> Path:
    (folder / "data.jsonl").write_text(LINE + "\n")
    JsonlPreparator.prepare_dataset(folder / "data.jsonl")
    return folder / "data.jsonl"


ZERO = "      - weight: 0\n        path: ./good\n"
LINE = json.dumps(messages(("user", "Hi"), ANSWERED))
NO_BLEND = r"blend\.yaml is not a blend of datasets that energon can read"
DATASETS = [
    BadData("no such path", lambda d: d / "nothing", "stop", "nothing does not exist", "start"),
    BadData("any file", plain_file, "stop", r"must be a prepared folder or the \.yaml file of a blend", "start"),
    BadData("empty folder", lambda d: d, "stop", r"has no \.nv-meta: it is not prepared", "start"),
    BadData("jsonl alone", bare_jsonl, "stop", r"python -m llava_mcore prepare .*data\.jsonl --out", "start"),
    BadData("blend without a part", blended("gone"), "stop", "gone does not exist", "start"),
    BadData("blend no yaml", blended(text="splits: [a"), "stop", NO_BLEND, "start"),
    BadData("blend another yaml", blended(text="splits: 3"), "stop", NO_BLEND, "start"),
    BadData("blend empty", blended(text=""), "stop", NO_BLEND, "start"),
    BadData("blend without train", blended(text=BLEND.replace("train", "val")), "stop", NO_BLEND, "start"),
    BadData("blend of weight 0", blended(text=BLEND + ZERO), "stop", "not all 0, found 0", "start"),
    BadData("blend of negative weight", blended(text=BLEND + ZERO.replace("0", "-1")), "stop", "found -1", "start"),
    BadData("jsonl in a blend", lines_in_blend(LINE, LINE, LINE), "fine"),
    BadData("jsonl with a bad line", lines_in_blend(LINE, '{"a" 1}', LINE, LINE), "skip", "Expecting ':'"),
    BadData(
        "jsonl grown", lines_in_blend(LINE, LINE, later=LINE), "stop", r"does not match lines\.jsonl\.idx", "start"
    ),
    BadData("cut before prepared", refused(cut_copy), "stop", "not complete", "start"),
    BadData("cut between samples", cut_at_a_file, "fine", "without an end mark, so they were truncated before"),
    BadData("tar without samples", refused(lambda d: write_tar(d / "000001.tar", {})), "stop", "not complete", "start"),
    BadData(
        "same keys in two tars",
        refused(lambda d: shutil.copy(d / "000000.tar", d / "000001.tar")),
        "stop",
        "not complete|not prepared",
        "start",
    ),
    BadData("all samples broken", all_broken, "stop", f"{UNDECODABLE} .*no known format"),
    BadData("fewer samples than ranks", few, "fine", ranks=2),
]
