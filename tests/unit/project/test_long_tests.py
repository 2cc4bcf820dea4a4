"""The list of long tests: patterns name tests that exist, and the last one that fits decides."""

from __future__ import annotations

import re

from tests.helpers.long_tests import FILE, is_long, long_patterns


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
