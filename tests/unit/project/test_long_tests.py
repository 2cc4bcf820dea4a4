"""No test is left out by mistake: pytest looks into all folders, and patterns of long tests name tests that exist."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest

from tests.helpers.long_tests import FILE, is_long, long_patterns


def test_every_folder_is_looked_into(request: pytest.FixtureRequest) -> None:
    """pytest's own setting leaves out folders named `build`."""
    left_out = request.config.getini("norecursedirs")
    tests = FILE.parent
    for file in tests.rglob("test_*.py"):
        folders = file.relative_to(tests).parent.parts
        assert not [x for x in folders if any(fnmatch(x, pattern) for pattern in left_out)], file


def test_patterns_name_tests() -> None:
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#") or line.endswith("/*"):
            continue
        path, _, name = line.removeprefix("!").partition("::")
        text = (FILE.parents[1] / path).read_text(encoding="utf-8")
        start = name.partition("*")[0].partition("[")[0]
        assert re.search(rf"def {start}" if start else "def test_", text), line


def test_the_last_pattern_decides() -> None:
    patterns = long_patterns()
    assert is_long("tests/parallel/test_generate.py::test_answers_while_training", patterns)
    assert not is_long("tests/parallel/test_layouts.py::test_parity_and_round_trip[2-2]", patterns)
    assert is_long("tests/parallel/test_layouts.py::test_parity_and_round_trip[1-2]", patterns)
    assert not is_long("tests/unit/project/test_long_tests.py::test_the_last_pattern_decides", patterns)
