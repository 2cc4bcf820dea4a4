"""Calls of tools in tables, whose objects have the fields of all rows."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llava_mcore.prepare.record_layouts import Keys, parse
from llava_mcore.prepare.row_types import BadSample
from tests.helpers.prepare_cases import make

Q, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def called(name: str, arguments: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    """A row with a call of a function; parameters: its schema's properties, else those of the arguments."""
    properties = parameters or {key: {"type": "string"} for key in arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": arguments}]}
    tools = [{"name": name, "parameters": {"type": "object", "properties": properties}}]
    return {"messages": [Q, call, {"role": "tool", "content": "2"}, A], "tools": tools}


def samples(folder: Path) -> list[Any]:
    """Messages and tools of the written samples, in order."""
    with tarfile.open(folder / "000000.tar") as tar:
        files = sorted((m for m in tar if m.name.endswith(".json")), key=lambda m: m.name)
        read = [json.loads((tar.extractfile(member) or pytest.fail()).read()) for member in files]
    return [(sample["messages"], sample["tools"]) for sample in read]


def test_what_a_table_fills_in_is_not_trained(tmp_path: Path) -> None:
    """Neither of Parquet files, nor of the JSON lines that are written of them."""
    rows = [called("weather", {"city": "Rome"}), called("search", {"query": "cats", "top": "3"})]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "table.parquet")
    for name, written in (("own", rows), ("filled", table.to_pylist())):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in written))
    assert '"city": null' in (tmp_path / "filled.jsonl").read_text()
    found = []
    for name in ("own.jsonl", "table.parquet", "filled.jsonl"):
        make(tmp_path / name, tmp_path / f"{name}.out")
        found.append(samples(tmp_path / f"{name}.out"))
    assert found[1:] == found[:1] * 2


def test_a_null_argument_that_a_function_declares_is_kept() -> None:
    row = called("add", {"a": None, "b": None}, a={"type": ["number", "null"]})
    for given, kept in ((row, {"a": None}), (row | {"tools": None}, {"a": None, "b": None})):
        turn = parse(given, Keys()).turns[1]
        assert turn.fields["tool_calls"][0]["function"]["arguments"] == kept


def test_a_tool_that_is_no_object_is_named() -> None:
    with pytest.raises(BadSample, match="`function` of a tool must be an object, found 'add'"):
        parse({"messages": [Q, A], "tools": [{"type": "function", "function": "add"}]}, Keys())
