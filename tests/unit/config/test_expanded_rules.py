"""What --train-expanded cannot be combined with, and what a plan knows of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llava_mcore.build.expand import expand_folder
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.adapter import trains_projection, trains_tower
from llava_mcore.config.rules.all_rules import check_run
from llava_mcore.plan.layout import layout_of
from llava_mcore.plan.parameters import stage_parameters
from llava_mcore.plan.sizes.read_config import read_model
from tests.helpers.run_settings import smallest_run
from tests.helpers.tiny_hf import make_hf_llava

FLAG = "model.train_expanded=true"


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    return smallest_run(tmp_path, FLAG)


def test_it_trains_neither_tower_nor_projection(good: list[str]) -> None:
    run = load_run_config(None, good)
    assert check_run(run, None, 1, device_available=False) == []
    assert not trains_tower(run) and not trains_projection(run)
    assert run.model.frozen_parts() == "all but the expanded layers"
    also = load_run_config(None, [*good, "model.unfreeze=vision_projection.*"])
    assert check_run(also, None, 1, device_available=False) == [] and trains_projection(also)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.freeze_language_model=true", "omit --freeze-lm and model.freeze_vision_model"),
        ("model.freeze_vision_model=false", "name what else to train in model.unfreeze"),
        ("adapter.r=4", "--train-expanded: with an adapter the model is frozen"),
    ],
)
def test_what_contradicts_it(good: list[str], change: str, said: str) -> None:
    (message,) = check_run(load_run_config(None, [*good, change]), None, 1, device_available=False)
    assert said in message


def test_a_plan_counts_the_inserted_layers(good: list[str], tmp_path: Path) -> None:
    make_hf_llava(tmp_path / "hf")
    expand_folder(tmp_path / "hf", tmp_path / "more", "every:2", print)
    model = read_model(tmp_path / "more")
    assert model.decoder.expanded == 2 and model.decoder.num_layers == 6
    layout = layout_of(load_run_config(None, good), 1, 6)
    parts = stage_parameters(model, layout, 0)
    all_trained = stage_parameters(model, replace(layout, trains_expanded=False, trains_projection=False), 0)
    without_ends = all_trained.trained - all_trained.ends
    assert parts.trained == pytest.approx(without_ends / 3)
