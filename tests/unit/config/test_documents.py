"""Configuration files that somebody else wrote: each ends in one message, soon, and none of it is run."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.cli import train
from llava_mcore.config.documents import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read_document
from llava_mcore.config.load import MAX_PROBLEMS, load_run_config
from llava_mcore.errors import ConfigError

LETTERS = "abcdefghij"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in itertools.pairwise(LETTERS)
)
MERGE_BOMB = "a: &a {k: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n" for old, new in itertools.pairwise(LETTERS)
)
BAD: list[tuple[str, bytes, str]] = [
    ("bomb.yaml", BOMB.encode(), f"more than {MAX_VALUES:,} values after expanding aliases (*)"),
    ("merge_bomb.yaml", MERGE_BOMB.encode(), f"more than {MAX_VALUES:,} values"),
    ("loop.yaml", b"data: &a {lang: [*a]}\n", "an alias (*) is inside the value that it repeats"),
    ("chain.yaml", b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (i + 1, i + 1, i) for i in range(500)), "deep"),
    ("deep.yaml", b"[" * 50_000, f"nested more than {MAX_DEPTH} levels deep"),
    ("deep.json", b"[" * 500_000 + b"]" * 500_000, f"nested more than {MAX_DEPTH} levels deep"),
    ("less_deep.json", b"[" * 40 + b"]" * 40, f"nested more than {MAX_DEPTH} levels deep"),
    ("wide.json", b"[" + b"1," * MAX_VALUES + b"1]", f"more than {MAX_VALUES:,} values"),
    ("large.yaml", b"# " + b"x" * MAX_BYTES, f"it has more than {MAX_BYTES:,} bytes"),
    ("latin.yaml", "name: é".encode("latin-1"), "not UTF-8 (byte 6)"),
    ("nul.yaml", b"name: \0", "unacceptable character"),
    ("tag.yaml", b"name: !!python/object/apply:os.system ['touch ran']\n", "could not determine a constructor"),
    ("name.yaml", b"name: !!python/name:os.system\n", "could not determine a constructor"),
    ("twice.yaml", b"data: {lang: jp, lang: en}\n", "'lang' is given twice"),
    ("twice.json", b'{"name": "a", "name": "b"}', "'name' is given twice"),
    ("key.yaml", b"? [a]\n: 1\n", "a key is a list or a mapping"),
    ("two.yaml", b"name: a\n---\nname: b\n", "expected a single document"),
    ("date.yaml", b"name: 2024-99-99\n", "month must be in 1..12"),
    ("digits.yaml", b"name: " + b"9" * 5000, "Exceeds the limit"),
]


@pytest.mark.parametrize(("name", "content", "expected"), BAD, ids=[row[0] for row in BAD])
def test_one_message(
    name: str, content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad file ends the command within seconds, with one message that names it."""
    (tmp_path / name).write_bytes(content)
    start = time.process_time()
    assert train.main(["--config", str(tmp_path / name)]) == 2
    assert time.process_time() - start < 10
    printed = capsys.readouterr().err
    assert str(tmp_path / name) in printed and expected in printed
    assert len(printed) < 2000
    assert [path.name for path in tmp_path.iterdir()] == [name] and not Path("ran").exists()


def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "link.yaml").symlink_to("/dev/zero")
    for path, kind in ((tmp_path / "pipe.yaml", "not a regular file"), (tmp_path / "link.yaml", "not a regular file")):
        with pytest.raises(ConfigError, match=kind):
            read_document(path)
    with pytest.raises(ConfigError, match="it is a folder"):
        read_document(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read_document(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.yaml",
            "base: &b {a: 1, b: 2}\nmore: {<<: *b, b: 3}\n",
            {"base": {"a": 1, "b": 2}, "more": {"a": 1, "b": 3}},
        ),
        ("a.yaml", "a: &x [1]\nb: *x\n", {"a": [1], "b": [1]}),
        ("a.yaml", "\ufeffa: 1\n", {"a": 1}),
        ("a.json", "\ufeff{}", {}),
        ("a.json", "", None),
        ("a.yaml", "[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
    ],
)
def test_what_is_fine(name: str, text: str, expected: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = read_document(tmp_path / name)
    assert found == expected or expected is None


def test_many_wrong_and_long_keys_are_cut_short(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"k" * 100_000: 1} | {f"key{i}": 1 for i in range(8000)}))
    start = time.process_time()
    with pytest.raises(ConfigError) as raised:
        load_run_config(tmp_path / "a.json", [f"name={'x' * 100_000}", "\x1b[2J=1"])
    assert time.process_time() - start < 15
    message = str(raised.value)
    assert f"… and {8003 - MAX_PROBLEMS} more" in message
    assert len(message) < 20_000 and "\x1b" not in message
