"""benchmarks/results/log.md holds what the benchmarks wrote, and nothing else."""

from __future__ import annotations

import re

from benchmarks.marked_tables import ROOT
from benchmarks.result_log import LOG, RESULTS, log


def test_the_log_is_made_of_the_results() -> None:
    assert LOG.read_text(encoding="utf-8") == log(sorted(RESULTS.glob("*.json"))), "run python -m benchmarks.result_log"


def test_commands_in_the_documents_are_modules_that_there_are() -> None:
    """`python benchmarks/x.py` would not find the other files of the folder."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    files += (ROOT / "benchmarks").glob("*.py")
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert not re.findall(r"python3? benchmarks/\w+", text)
    named = set(re.findall(r"python -m benchmarks\.([\w.]*\w)", text))
    assert named and not [
        name for name in named if not (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file()
    ]
