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
    """The table of classes is the one that the code gives."""
    assert capability_table() in README, "run python -m tests.helpers.capabilities"
    assert ON_GPUS.keys() <= ARCHITECTURES.keys()


def test_the_quickstart_s_answers() -> None:
    """The image and the share are those of one run."""
    with Image.open(ROOT / "docs" / "quickstart.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 800
    assert (ROOT / "docs" / "quickstart.png").stat().st_size < 300_000
    results = json.loads((ROOT / "docs" / "quickstart.json").read_text(encoding="utf-8"))
    assert f"names {results['exact_match']['which digit']:.1%} of" in README.replace(" %", "%")
    assert "after four minutes" in README and 200 < sum(results["seconds"].values()) < 260


def test_the_rounds_of_faults() -> None:
    """The numbers of rounds are those of the recorded results."""
    disturbed, right = survived()
    text = " ".join(README.split())
    assert f"[{disturbed} kills, hangs, flipped bytes and full disks](benchmarks/results/chaos.md)" in text
    assert f"{right} rounds passed, and one failed because of a test bug" in text and disturbed - right == 1


def test_order_of_the_page() -> None:
    """The image, the commands, the measurements, the table and the links come in this order."""
    marks = ["docs/quickstart.png", "## From a Hugging Face folder to answers", "make venv", "<!-- measured -->"]
    places = [README.index(mark) for mark in [*marks, capability_table(), "docs/README.md"]]
    assert places == sorted(places)


def test_the_page_is_short() -> None:
    assert len(re.findall(r"\]\(", README)) <= 10
    assert len(README.split()) < 1200
