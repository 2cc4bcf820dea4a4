"""docs/quickstart.md has the word error rates of the recorded run of examples/speech."""

from __future__ import annotations

import json
from pathlib import Path


def test_the_page_has_the_scores_of_the_recorded_run() -> None:
    docs = Path(__file__).parents[3] / "docs"
    results = json.loads((docs / "speech.json").read_text(encoding="utf-8"))
    page = (docs / "quickstart.md").read_text(encoding="utf-8")
    before, after = (results["scores"][when] for when in ("before training", "after training"))
    known = results["held_out"]["prompts with known words only"]
    counted = {"word error rate, known words only": f"word error rate, known words only ({known} prompts)"}
    for name, share in after.items():
        title = counted.get(name, name)
        assert f"| {title} | {100 * before[name]:.1f} % | {100 * share:.1f} % |" in page
    assert f"{results['held_out']['prompts']} prompts whose text" in page
    assert f"After {results['loss']['iterations']} iterations" in page
