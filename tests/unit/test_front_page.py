"""README.md: its figures are those of files in the repository, its table of classes that of the registry."""

from __future__ import annotations

import json
import re

from PIL import Image

from benchmarks.marked_tables import ROOT, survived
from llava_mcore.models.architectures.registry import ARCHITECTURES
from tests.helpers.capabilities import ON_GPUS, capability_table

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_architectures_and_their_capabilities() -> None:
    assert capability_table() in README, "run python -m tests.helpers.capabilities"
    assert ON_GPUS.keys() <= ARCHITECTURES.keys()


def test_the_quickstart_s_answers() -> None:
    """The picture and the share are those of one run."""
    with Image.open(ROOT / "docs" / "quickstart.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 800
    assert (ROOT / "docs" / "quickstart.png").stat().st_size < 300_000
    results = json.loads((ROOT / "docs" / "quickstart.json").read_text(encoding="utf-8"))
    assert f"names {results['exact_match']['which digit']:.1%} of" in README.replace(" %", "%")
    assert re.search(r"after six minutes", README) and 330 < sum(results["seconds"].values()) < 420


def test_the_rounds_of_faults() -> None:
    disturbed, right = survived()
    assert f"Of [{disturbed} kills, hangs, flipped bytes and full disks](benchmarks/results/chaos.md)" in README
    assert f"at random moments, {right} ended so" in " ".join(README.split())
    assert disturbed - right == 1 and "one failed because of a test bug" in " ".join(README.split())


def test_order_of_the_first_screen() -> None:
    marks = ["docs/quickstart.png", "<!-- measured -->", capability_table(), "make quickstart\n"]
    places = [README.index(mark) for mark in marks]
    assert places == sorted(places)
