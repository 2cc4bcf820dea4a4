"""Records of several replicas become one file, in the order of the data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from llava_mcore.inference.answering.answer_file import finish, partial_of, written_to
from llava_mcore.inference.answering.job import Layout, SampleShare
from llava_mcore.inference.answering.megatron_answers import _merged
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
    for replica, indexed in parts.items():
        lines = [json.dumps([index, asdict(one)], ensure_ascii=False) + "\n" for index, one in indexed]
        answers_file(tmp_path, replica).write_text("".join(lines), encoding="utf-8")
    records = _merged(tmp_path, 2)
    assert [one.key for one in records] == ["a#0", "a#1", "b", "c", "d"]
    assert records[1].answer == "two\u2028lines\x85"


def test_nothing_is_left_of_replicas(tmp_path: Path) -> None:
    """Not even of a killed command with more of them, which had other records."""
    out = tmp_path / "answers.jsonl"
    partial = partial_of(out)
    for replica in range(4):
        partial_file(partial, SampleShare(replica, 4)).write_text("so far")
    other = tmp_path / "answers.jsonl.partial.backup"
    other.touch()
    with written_to(partial) as write:
        write([record("a"), record("b", None)])
    finish(out)
    assert [json.loads(line)["key"] for line in out.read_bytes().splitlines()] == ["a", "b"]
    assert sorted(tmp_path.iterdir()) == [out, other]


def test_one_replica_writes_its_own_file(tmp_path: Path) -> None:
    assert partial_file(tmp_path / "x.partial", SampleShare()) == tmp_path / "x.partial"
    assert str(Layout(2, 1, 8, replicas=4)) == "tp 2 x pp 1 x 4 replicas" and Layout(2, 1, 8, replicas=4).size == 8
