"""The importer: every format gives the same samples, and what goes in comes out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llava_mcore.errors import DataError
from llava_mcore.prepare.media.images import read_image
from llava_mcore.prepare.record_layouts import Keys, parse
from llava_mcore.prepare.row_types import BadSample
from llava_mcore.prepare.shard_plan import Options
from llava_mcore.prepare.sources.base import Cuts
from llava_mcore.prepare.sources.detect import Format, Opening, find_files
from tests.helpers import prepare_cases as cases
from tests.helpers.prepare_cases import Case, chat_cases, contents, make, picture, read_back, shard_bytes, vqa_cases

Writer = Callable[[Path, Sequence[Case]], Path]

CHAT_WRITERS: dict[str, tuple[Writer, Format]] = {
    "llava json": (cases.write_llava, "llava"),
    "llava jsonl": (cases.write_llava_lines, "llava"),
    "sharegpt": (cases.write_sharegpt, "sharegpt"),
    "openai": (cases.write_openai, "openai"),
    "parquet struct": (cases.write_parquet, "parquet"),
    "parquet bytes": (partial(cases.write_parquet, kind="bytes"), "parquet"),
    "parquet path": (partial(cases.write_parquet, kind="path"), "parquet"),
    "hub folder": (cases.write_hub, "huggingface"),
    "saved dataset": (cases.write_saved, "huggingface"),
}
VQA_WRITERS: dict[str, tuple[Writer, Format]] = {
    "columns": (cases.write_columns, "parquet"),
    "triples": (cases.write_triples, "vqa"),
    "tars": (cases.write_tars, "vqa"),
}


@pytest.mark.parametrize("name", CHAT_WRITERS)
def test_conversations_in_every_format(name: str, tmp_path: Path) -> None:
    """Every format gives the same samples, whether it is detected or named."""
    writer, wanted = CHAT_WRITERS[name]
    source = writer(tmp_path / "src", chat_cases())
    result = make(source, tmp_path / "auto")
    assert contents(tmp_path / "auto") == [case.content for case in chat_cases()]
    assert (result.counts.skipped, result.num_shards, result.finished) == (0, 2, True)
    make(source, tmp_path / "named", how=Opening(wanted))
    assert shard_bytes(tmp_path / "named") == shard_bytes(tmp_path / "auto")


@pytest.mark.parametrize("name", VQA_WRITERS)
def test_questions_in_every_format(name: str, tmp_path: Path) -> None:
    """Every format gives the same samples."""
    writer, wanted = VQA_WRITERS[name]
    source = writer(tmp_path / "src", vqa_cases(9))
    make(source, tmp_path / "out", how=Opening(wanted))
    assert contents(tmp_path / "out") == [case.content for case in vqa_cases(9)]


def test_texts_and_keys() -> None:
    """Rows with `texts` are read, and columns by the names that are given."""
    pairs = {"texts": [{"user": "<image>\nA?", "assistant": "B", "source": "x"}], "images": [b"1"]}
    draft = parse(pairs, Keys())
    assert [(t.role, t.text) for t in draft.turns] == [("user", "<image>\nA?"), ("assistant", "B")]
    named = parse({"ask": "A?", "say": "B", "pic": [b"1", b"2"]}, Keys("pic", "ask", "say"))
    assert [t.text for t in named.turns] == ["A?", "B"] and named.images == (b"1", b"2")


def test_captions(tmp_path: Path) -> None:
    """Only where they are asked for, a missing question is none that was forgotten."""
    (tmp_path / "0.jpg").write_bytes(picture(0))
    rows = [
        {"image": "0.jpg", "caption": "A zero."},
        {"image": "0.jpg", "caption": "Nought."},
        {"caption": "No image."},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    forgotten = make(tmp_path / "rows.jsonl", tmp_path / "a", how=Opening(keys=Keys(answer="caption")))
    assert forgotten.counts.reasons == {"no conversation": 3}
    how = Opening(keys=Keys(answer="caption", captions=True))
    result = make(tmp_path / "rows.jsonl", tmp_path / "b", how=how, max_skip_rate=0.5)
    assert result.counts.reasons == {"empty question": 1}
    assert [s["messages"][0]["content"] for s in read_back(tmp_path / "b")] == ["<image>", "<image>"]


def test_pictures_keep_the_order_of_their_marks_however_they_are_given() -> None:
    row = {
        "images": [b"listed 0", b"listed 1"],
        "messages": [
            {"role": "user", "content": "<image> first"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [{"type": "image", "path": "named"}, {"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "image", "url": None}]},
            {"role": "assistant", "content": "e"},
        ],
    }
    draft = parse(row, Keys())
    assert draft.images == (b"listed 0", "named", b"listed 1")
    assert [t.text for t in draft.turns][2:5] == ["<image>\na", "bc", "d\n<image>"]


def test_samples_say_where_they_come_from(tmp_path: Path) -> None:
    make(cases.write_llava(tmp_path / "src", chat_cases()), tmp_path / "out")
    samples = read_back(tmp_path / "out")
    assert [s["key"] for s in samples] == [f"{i:09d}" for i in range(7)]
    assert samples[5]["source"] == {"file": "llava.json", "index": 5, "id": "5"}
    assert samples[4]["image_sizes"] == [[24, 18], [24, 18]] and samples[3]["image_sizes"] == []
    assert "num_tokens" not in samples[0]


def test_own_shards_can_be_prepared_again(tmp_path: Path) -> None:
    make(cases.write_sharegpt(tmp_path / "src", chat_cases()), tmp_path / "once")
    make(tmp_path / "once", tmp_path / "twice", Options(rows_per_shard=3))
    assert contents(tmp_path / "twice") == [case.content for case in chat_cases()]


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40).filter(
    lambda text: bool(text.strip()) and "<image>" not in text
)


@st.composite
def conversations(draw: st.DrawFn) -> Case:
    """Any text, with marks before, within and after questions."""
    turns, number = [], 0
    if draw(st.booleans()):
        turns.append(("system", draw(TEXT)))
    for role in ["user", "assistant"] * draw(st.integers(1, 3)):
        text = draw(TEXT)
        for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2))) if role == "user" else 0):
            place = draw(st.integers(0, len(text)))
            text = f"{text[:place]}<image>{text[place:]}"
            number += 1
        turns.append((role, text))
    number = sum(text.count("<image>") for _, text in turns)
    return Case(tuple(turns), tuple(picture(draw(st.integers(0, 20))) for _ in range(number)))


@settings(max_examples=25)
@given(st.lists(conversations(), min_size=1, max_size=9), st.sampled_from((".json", ".jsonl")), st.integers(1, 5))
def test_what_goes_in_comes_out(rows: list[Case], suffix: str, rows_per_shard: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / f"rows{suffix}"
        content: Any = cases.llava_rows(Path(name), rows)
        source.write_text(
            json.dumps(content) if suffix == ".json" else "".join(f"{json.dumps(row)}\n" for row in content)
        )
        make(source, Path(name) / "out", Options(rows_per_shard=rows_per_shard))
        assert contents(Path(name) / "out") == [case.content for case in rows]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


@settings(max_examples=60)
@given(
    st.lists(VALUES, max_size=12), st.integers(1, 5), st.integers(0, 7), st.sampled_from((None, 2)), st.integers(1, 40)
)
def test_json_lists_are_cut_at_the_right_bytes(
    values: list[Any], rows_per_shard: int, first_row: int, indent: int | None, block: int
) -> None:
    """Whatever stands in the list, however small the blocks: the segments hold exactly its elements."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("llava_mcore.prepare.sources.array.BLOCK", block)
        path = Path(name) / "list.json"
        path.write_text(json.dumps(values, ensure_ascii=False, indent=indent), encoding="utf-8")
        (file,) = find_files(path, Opening())
        scan = file.scan(Cuts(0, first_row, rows_per_shard))
        assert scan.num_rows == len(values)
        rows = [row for segment in scan.segments for row in file.read(segment)]
        assert [row.index for row in rows] == list(range(len(values)))
        for row, value in zip(rows, values, strict=True):
            assert row.data == value if isinstance(value, dict) else isinstance(row.data, BadSample)
        for segment in scan.segments[1:]:
            assert segment.row % rows_per_shard == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"a": 1}, {"a": 2}', "ends within the list"),
        ('[{"a": 1} {"a": 2}]', "',' or ']' is missing"),
        ('[{"a": 1}, ]', "missing after a comma"),
        ('[{"a": 1}] x', "more after the list"),
        ('[{"a": tru}]', "byte 7"),
        ('[{"a": "x]', "Unterminated string"),
    ],
)
def test_broken_lists_are_refused_with_the_byte(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(DataError, match=r"list\.json is not a JSON list of objects: byte \d+: ") as caught:
        make(tmp_path / "list.json", tmp_path / "out")
    assert told in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_lines_with_bom_blanks_and_no_end(tmp_path: Path) -> None:
    row = json.dumps({"question": "Q", "answer": "A"}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b"\n\n  \n" + row + b"\r\n" + row)
    result = make(tmp_path / "a.jsonl", tmp_path / "out", Options(rows_per_shard=2))
    assert [s["source"]["index"] for s in read_back(tmp_path / "out")] == [0, 3, 4]
    assert result.counts.rows == 3 and result.counts.skipped == 0


def test_pictures_of_every_reference(tmp_path: Path) -> None:
    """Bytes, relative and absolute paths and file URLs name the same image."""
    data = picture(0, "PNG")
    path = tmp_path / "an image: one.png"
    path.write_bytes(data)
    uri = path.as_uri()
    assert "%20" in uri
    for reference in (data, path.name, str(path), uri, uri.replace("file:", "file://localhost", 1).replace("///", "/")):
        assert read_image(reference, tmp_path).data == data
    assert read_image({"bytes": None, "path": path.name}, tmp_path).extension == "png"


def test_sources_that_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        find_files(tmp_path / "none.json", Opening())
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(DataError, match=r"a\.csv has an unknown format; supported are"):
        find_files(tmp_path / "a.csv", Opening())
    (tmp_path / "one.json").write_text('{\n"a": 1}')
    with pytest.raises(DataError, match="neither a list of objects nor JSON lines"):
        find_files(tmp_path / "one.json", Opening())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no files"):
        find_files(tmp_path / "empty", Opening())
    source = cases.write_llava(tmp_path / "src", vqa_cases(1))
    with pytest.raises(DataError, match="cannot be read with --format vqa"):
        find_files(source, Opening("vqa"))
    with pytest.raises(DataError, match=r"no part 'val', only train; choose with --source-split"):
        find_files(cases.write_saved(tmp_path / "hf", vqa_cases(5)), Opening(split="val"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        make(tmp_path / "a.parquet", tmp_path / "out")
    with pytest.raises(DataError, match="not under a key"):
        find_files(cases.write_triples(tmp_path / "t", vqa_cases(1)), Opening(keys=Keys(image="picture")))
