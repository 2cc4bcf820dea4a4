"""The numbered walks in docstrings of packages name files and functions that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "llava_mcore"
WALKS = {"launch": range(1, 6), "training": range(6, 13)}


def names_of(file: Path) -> set[str]:
    """Return functions and classes of a file, and methods as Class.method."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("package", WALKS)
def test_a_walk_names_what_there_is(package: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text(encoding="utf-8")))
    assert text is not None
    assert [int(x) for x in re.findall(r"^(\d+)\. ", text, re.MULTILINE)] == list(WALKS[package])
    steps = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", text)
    assert len(steps) >= len(WALKS[package])
    for file, name in steps:
        assert (PACKAGE / file).is_file(), file
        assert not name or name in names_of(PACKAGE / file), f"{file}: {name}"
