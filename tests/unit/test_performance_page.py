"""docs/performance.md holds what the benchmarks wrote, and nothing else."""

from __future__ import annotations

from benchmarks.performance_page import PAGE, RESULTS, page


def test_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(sorted(RESULTS.glob("*.json"))), (
        "run python -m benchmarks.performance_page"
    )
