"""Sources that people have: tables with nested media, datasets that `datasets` saved, files at URLs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llava_mcore.__main__ import main
from llava_mcore.errors import DataError
from llava_mcore.prepare.shard_plan import Options
from llava_mcore.prepare.sources.fetch import fetch
from tests.helpers import prepare_cases as cases
from tests.helpers.prepare_cases import contents, make, picture, vqa_cases

ONE, TWO = picture(1), picture(2)
STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})
TEXT = "<image>\n<image>\nWhich?"
EXPECTED = {
    "messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "7"}],
    "pictures": [ONE, TWO],
}
PART = pa.struct({"type": pa.string(), "text": pa.string(), "image": STRUCT})
TURNS = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "7"}]
EXPECTED = {"messages": TURNS, "pictures": [ONE, TWO]}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "7"}]}
NAMES = pa.struct({"user": pa.large_string(), "assistant": pa.string(), "source": pa.string()})
TYPED = [
    {"type": "image", "image": {"bytes": ONE, "path": None}},
    {"type": "image", "image": {"bytes": TWO, "path": "x.jpg"}},
    {"type": "text", "text": "Which?"},
]
COLUMNS: dict[str, tuple[dict[str, Any], dict[str, pa.DataType]]] = {
    "images within typed parts of turns": (
        {
            "messages": [
                {"role": "user", "content": TYPED},
                {"role": "assistant", "content": [{"type": "text", "text": "7"}]},
            ]
        },
        {"messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.list_(PART)}))},
    ),
    "typed parts without references, images beside them": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]},
                ANSWER,
            ],
            "images": [{"bytes": ONE}, {"bytes": TWO}],
        },
        {
            "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.list_(PART)})),
            "images": pa.list_(STRUCT),
        },
    ),
    "one list per field, as Sequence of a dict": (
        {
            "conversations": {"from": ["human", "gpt"], "value": [TEXT, "7"]},
            "images": {"bytes": [ONE, TWO], "path": [None, None]},
        },
        {
            "conversations": pa.struct({"from": pa.list_(pa.string()), "value": pa.list_(pa.string())}),
            "images": pa.struct({"bytes": pa.list_(pa.binary()), "path": pa.list_(pa.string())}),
        },
    ),
    "pairs, large and fixed lists": (
        {"texts": [{"user": TEXT, "assistant": "7", "source": "x"}], "images": [{"bytes": ONE}, {"bytes": TWO}]},
        {
            "texts": pa.large_list(
                pa.struct({"user": pa.large_string(), "assistant": pa.string(), "source": pa.string()})
            ),
            "images": pa.list_(STRUCT, 2),
        },
    ),
    "JSON in a column": (
        {"messages": json.dumps(TURNS), "images": [ONE, TWO]},
        {"messages": pa.string(), "images": pa.list_(pa.large_binary())},
    ),
    "names that stand for numbers": (
        {"question": TEXT, "answer": "7", "images": [{"bytes": ONE}, {"bytes": TWO}]},
        {"question": pa.dictionary(pa.int32(), pa.string()), "answer": pa.string(), "images": pa.list_(STRUCT)},
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_nested_media_of_tables(name: str, tmp_path: Path) -> None:
    row, types = COLUMNS[name]
    table = pa.Table.from_pylist([row] * 5, pa.schema(types))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for seed in (None, 0):
        make(tmp_path / "a.parquet", tmp_path / f"out {seed}", Options(shuffle_seed=seed))
        assert contents(tmp_path / f"out {seed}") == [EXPECTED] * 5


def test_what_datasets_saves(tmp_path: Path) -> None:
    """Datasets of `datasets` itself: saved with and without splits, and as Parquet files of a repository."""
    datasets = pytest.importorskip("datasets")
    image = datasets.Image(decode=False)
    parts = [{"type": datasets.Value("string"), "text": datasets.Value("string"), "image": image}]
    messages = [{"role": datasets.Value("string"), "content": parts}]
    none = {"text": None, "image": None}
    turns = [
        {"role": "user", "content": [none | part for part in TYPED]},
        {"role": "assistant", "content": [none | {"type": "text", "text": "7"}]},
    ]
    features = datasets.Features({"messages": messages})
    data = datasets.Dataset.from_list([{"messages": turns}] * 5, features=features)
    data.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "parts"))
    for split in ("train", "test"):
        target = tmp_path / "hub" / "default" / split
        target.mkdir(parents=True)
        data.to_parquet(str(target / "0000.parquet"))
    for name in ("one", "parts", "hub/default"):
        make(tmp_path / name, tmp_path / f"out-{name.partition('/')[0]}", Options(shuffle_seed=0))
        assert contents(tmp_path / f"out-{name.partition('/')[0]}") == [EXPECTED] * 5


def test_files_at_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and their images are fetched once, and again only what has changed; a continued run reads the copies."""
    local = cases.write_llava_lines(tmp_path / "src", vqa_cases(6)).parent
    store = fsspec.filesystem("memory")
    store.put(f"{local}/", "/set", recursive=True)
    store.pipe_file("/set/.hidden", b"x")
    out = tmp_path / "out"
    command = ["prepare", "memory://set/llava.jsonl", "--out", str(out), "--num-workers", "0", "--keep-order"]
    assert main(command) == 2, "its images are in the folder"
    command[1] = "memory://set"
    assert main([*command, "--overwrite"]) == 0
    assert contents(out) == [case.content for case in vqa_cases(6)]
    assert main(command) == 0, "the same source again"
    names: list[str] = []
    place = tmp_path / "kept"
    fetch("memory://set", place, names.append)
    assert "llava.jsonl" in names and ".hidden" not in names and len(names) == 7
    names.clear()
    store.pipe_file("/set/llava.jsonl", store.cat_file("/set/llava.jsonl").replace(b"It is", b"It was"))
    folder = fetch("memory://set", place, names.append)
    assert names == ["llava.jsonl"] and b"It was" in (folder / "llava.jsonl").read_bytes()
    capsys.readouterr()
    assert main(command) == 2 and "llava.jsonl has changed" in capsys.readouterr().err
    store.rm("/set", recursive=True)
    for url, message in (("memory://set", "memory://set "), ("no-such://x/y", "no-such://x/y cannot be read")):
        with pytest.raises(DataError, match=message):
            fetch(url, place)
    listing = tmp_path / "mix.yaml"
    store.put(f"{local}/", "/two", recursive=True)
    listing.write_text(f"sources:\n  - {{path: memory://two, name: a}}\n  - {{path: {local.name}/llava.jsonl}}\n")
    assert main(["prepare", str(listing), "--out", str(tmp_path / "mix"), "--num-workers", "0"]) == 0
    assert len(contents(tmp_path / "mix" / "a")) == len(contents(tmp_path / "mix" / "llava")) == 6
