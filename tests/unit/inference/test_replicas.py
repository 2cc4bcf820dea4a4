"""Records of several replicas become one file, in the order of the data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from llava_mcore.inference.answering.job import Layout, SampleShare
from llava_mcore.inference.answering.megatron_answers import _merged, _write_merged
from llava_mcore.inference.answering.megatron_worker import answers_file, partial_file
from llava_mcore.inference.generation.records import Record


def record(key: str, answer: str | None = "yes") -> Record:
    """A record that was answered, or could not be asked."""
    return Record(key, "?", "yes", answer, 1, None if answer else "broken image")


def test_records_keep_the_order_of_the_data(tmp_path: Path) -> None:
    """A sample has no question, one or several; an answer may have separators that Python takes for line ends."""
    parts = {
        0: [(0, record("a#0")), (0, record("a#1", "two\u2028lines\x85")), (2, record("c", None))],
        1: [(1, record("b")), (3, record("d"))],
    }
    partial = tmp_path / "answers.jsonl.partial"
    for replica, indexed in parts.items():
        lines = [json.dumps([index, asdict(one)], ensure_ascii=False) + "\n" for index, one in indexed]
        answers_file(tmp_path, replica).write_text("".join(lines), encoding="utf-8")
        partial_file(partial, SampleShare(replica, 2)).write_text("so far")
    records = _merged(tmp_path, 2)
    assert [one.key for one in records] == ["a#0", "a#1", "b", "c", "d"]
    assert records[1].answer == "two\u2028lines\x85"
    _write_merged(partial, 2, records)
    assert [json.loads(line)["key"] for line in partial.read_bytes().splitlines()] == ["a#0", "a#1", "b", "c", "d"]
    assert [path.name for path in tmp_path.glob("*.partial*")] == [partial.name]


def test_one_replica_writes_its_own_file(tmp_path: Path) -> None:
    assert partial_file(tmp_path / "x.partial", SampleShare()) == tmp_path / "x.partial"
    assert str(Layout(2, 1, 8, replicas=4)) == "tp 2 x pp 1 x 4 replicas" and Layout(2, 1, 8, replicas=4).size == 8
