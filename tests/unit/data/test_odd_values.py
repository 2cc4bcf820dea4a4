"""Values of strange types and sizes in a folder's configs end in a message, never in a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.budgets import media_budgets
from llava_mcore.errors import LlavaMcoreError
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from tests.helpers.cases import EACH_CLASS, make_case

CONFIGS = ("config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
ODD = (0, -1, 1.5, True, None, "x", [1], [[1, 2, 3]], {})
CHANGES_PER_CLASS = 30


def keys(values: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the place of every value in nested dictionaries."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield (*before, name)
            yield from keys(value, (*before, name))


def changed(text: str, place: tuple[str, ...], value: Any) -> str:
    whole = json.loads(text)
    section = whole
    for name in place[:-1]:
        section = section[name]
    section[place[-1]] = value
    return json.dumps(whole)


def read(folder: Path) -> None:
    """Do what a run does with the configs before it starts."""
    model_dims(load_hf_config(folder))
    media_budgets(load_assets(folder))


@pytest.mark.parametrize("case", EACH_CLASS, ids=lambda case: case.architecture)
def test_changed_values(case: Any, tmp_path: Path) -> None:
    """A folder with one odd value is read or refused with our own message, never a traceback."""
    make_case(case, tmp_path)
    read(tmp_path)
    texts = {name: (tmp_path / name).read_text() for name in CONFIGS if (tmp_path / name).is_file()}
    places = [(name, place) for name, text in texts.items() for place in keys(json.loads(text))]
    draw, refused = random.Random(case.architecture), 0
    for _ in range(CHANGES_PER_CLASS):
        (name, place), value = draw.choice(places), draw.choice(ODD)
        (tmp_path / name).write_text(changed(texts[name], place, value))
        try:
            read(tmp_path)
        except LlavaMcoreError as error:
            refused += 1
            assert str(tmp_path) in str(error) or place[-1] in str(error), (name, place, value)
        (tmp_path / name).write_text(texts[name])
    assert refused > 3
