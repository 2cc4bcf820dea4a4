"""Which tests take long: the patterns in `tests/long_tests.txt`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).parents[1] / "long_tests.txt"


def long_patterns() -> list[tuple[re.Pattern[str], bool]]:
    """Return each pattern of test ids, and whether a test that fits it takes long."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line and not line.startswith("#")]
    return [(_compiled(text.removeprefix("!")), not text.startswith("!")) for text in texts]


def is_long(test_id: str, patterns: Sequence[tuple[re.Pattern[str], bool]]) -> bool:
    """Return what the last pattern says that fits a test; False without any."""
    return next((long for pattern, long in reversed(patterns) if pattern.fullmatch(test_id)), False)


def _compiled(text: str) -> re.Pattern[str]:
    """Compile a pattern in which only * is special: test ids have brackets."""
    return re.compile("(?s:.*)".join(map(re.escape, text.split("*"))))
