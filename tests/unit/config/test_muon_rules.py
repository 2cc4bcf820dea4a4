"""What Muon cannot be combined with, and what a plan knows of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run
from llava_mcore.config.rules.muon import MUON_MISSING
from llava_mcore.launch.preflight import _missing_libraries
from llava_mcore.plan.layout import layout_of
from llava_mcore.plan.memory import _state
from llava_mcore.plan.parameters import StageParameters
from tests.helpers.run_settings import smallest_run

MUON = "optimizer.name=muon"


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    return smallest_run(tmp_path, MUON)


@pytest.mark.parametrize(
    "changes",
    [[], ["parallel.use_distributed_optimizer=true"], ["training.precision=fp16"], ["model.freeze_vision_model=false"]],
    ids=str,
)
def test_what_fits(good: list[str], changes: list[str]) -> None:
    assert check_run(load_run_config(None, [*good, *changes]), None, 1, device_available=False) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["adapter.r=4"], "an adapter has two factors of each update: omit optimizer.name for AdamW, or the adapter"),
        (
            ["optimizer.use_precision_aware_optimizer=true", "parallel.use_distributed_optimizer=true"],
            "does not work with optimizer.name muon",
        ),
        (["parallel.fsdp=optim_grads"], "--fsdp optim_grads does not work with optimizer.name muon yet"),
    ],
    ids=["adapter", "precision", "fsdp"],
)
def test_what_does_not(good: list[str], changes: list[str], said: str) -> None:
    (message,) = check_run(
        load_run_config(None, [*good, *changes, "training.precision=bf16"]), None, 2, device_available=True
    )
    assert said in message


def test_keys_of_muon_need_muon(good: list[str]) -> None:
    run = load_run_config(None, [*good, "optimizer.name=adamw", "optimizer.muon_momentum=0.9"])
    (message,) = check_run(run, None, 1, device_available=False)
    assert message.startswith("optimizer.muon_momentum has no effect without optimizer.name muon")


def test_the_package_is_named(good: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run_config(None, good)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _missing_libraries(run) == [MUON_MISSING]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    assert _missing_libraries(run) == []


def test_a_plan_counts_one_value_less_for_matrices(good: list[str]) -> None:
    """Embeddings and norms keep AdamW's two."""
    parts = StageParameters(layers=1000, small=10, ends=100, tower=0, connector=50, adapter=0, trained=1160)
    sizes = []
    for more in (["optimizer.name=adamw"], [], ["parallel.use_distributed_optimizer=true"]):
        run = load_run_config(None, [*good, "training.precision=bf16", *more])
        sizes.append(_state(layout_of(run, 2, 4), parts))
    assert sizes == [12 * 1160, 12 * 1160 - 4 * 1050, (12 * 1160 - 4 * 1050) / 2]
