"""README.md's first screen: its figures are those of files in the repository, its table that of the registry."""

from __future__ import annotations

import json
import re

from PIL import Image

from benchmarks.marked_tables import FRONT_PAGE, ROOT
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


def test_order_of_the_first_screen() -> None:
    headings = [f"| **{heading}**" for heading in FRONT_PAGE]
    marks = ["docs/quickstart.png", *headings, capability_table(), "make quickstart\n"]
    places = [README.index(mark) for mark in marks]
    assert places == sorted(places) and places[-1] < README.index("## Your own model")


def test_files_that_the_first_screen_names_exist() -> None:
    first = README[: README.index("## Two commands")]
    named = re.findall(r"`(tests/[\w/]+\.py)`", first) + re.findall(r"\]\(([\w./-]+)[)#]", first)
    assert len(named) > 10 and not [name for name in named if not (ROOT / name).is_file()]
