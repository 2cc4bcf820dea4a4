"""docs/performance.md holds what the benchmarks wrote, and nothing else."""

from __future__ import annotations

import re

from benchmarks.performance_page import PAGE, RESULTS, page


def test_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(sorted(RESULTS.glob("*.json"))), (
        "run python -m benchmarks.performance_page"
    )


def test_commands_in_the_documents_are_modules_that_there_are() -> None:
    """`python benchmarks/x.py` would not find the other files of the folder."""
    root = PAGE.parents[1]
    files = [root / "README.md", *PAGE.parent.glob("*.md"), *(root / "benchmarks").glob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert not re.findall(r"python3? benchmarks/\w+", text)
    named = set(re.findall(r"python -m benchmarks\.(\w+)", text))
    assert named and not [name for name in named if not (root / "benchmarks" / f"{name}.py").is_file()]
