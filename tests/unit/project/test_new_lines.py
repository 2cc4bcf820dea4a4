"""Where a new line goes: how many library files name a thing of each kind, how long files and functions are, with the
goals as limits."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.pages import files

ROOT = Path(__file__).parents[3]
GOALS = {"optimizer": 3, "loss term": 3, "metric": 2, "flag": 1, "connector": 2, "class": 4}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60


@cache
def sources() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "llava_mcore").rglob("*.py")
    }


def naming(pattern: str) -> list[str]:
    """Return the library files in which a name occurs, as an identifier or in a string."""
    return sorted(name for name, text in sources().items() if re.search(rf"(?<!\w){pattern}(?!\w)", text))


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("optimizer", "optimizer.md"),
        ("loss term", "loss.md"),
        ("connector", "connector.md"),
        ("class", "class.md"),
    ],
)
def test_a_page_touches_few_files(kind: str, page: str) -> None:
    """Each page is followed by tests/unit/*/test_extend_….py, so these are all."""
    assert 0 < len(files(page)) <= GOALS[kind]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("optimizer", '"adamw"'),
        ("optimizer", r"torch\.optim\.AdamW"),
        ("metric", "num_truncated"),  # of the loader
        ("metric", "data_wait_seconds"),  # of the host
        ("flag", '"--on-too-long"'),
        ("flag", '"--keep-last"'),
        ("flag", '"--alert-spike"'),
        ("connector", "Perceiver"),
        ("connector", "ShuffleLinear"),
        ("class", "LlavaNext"),
        ("class", "Qwen2Audio"),
    ],
)
def test_what_there_is_is_named_in_few_files(kind: str, name: str) -> None:
    assert 0 < len(naming(name)) <= GOALS[kind], naming(name)


def test_a_metric_of_the_device_is_named_where_it_is_computed_and_in_a_table() -> None:
    """None comes with the library: those of the page."""
    per_block = [name for name in files("metric.md") if "models/" in name or name.endswith("metrics_file.py")]
    assert len(per_block) == GOALS["metric"]


def test_files_and_functions_are_short() -> None:
    long_files = [name for name, text in sources().items() if text.count("\n") > MAX_FILE_LINES]
    functions = [
        (name, node)
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 1000
    sizes = {f"{name}: {node.name}": (node.end_lineno or 0) - node.lineno + 1 for name, node in functions}
    assert long_files == []
    assert [name for name, size in sizes.items() if size > MAX_FUNCTION_LINES] == []
