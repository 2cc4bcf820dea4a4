"""The quickest of the rough trials; `python -m tests.e2e.rough_trials` tries all of them, for half an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.rough_rows import TRIALS
from tests.helpers.rough import CannotBeTried, Shared, Trial, try_it

BUSY = 4  # times as long as alone on a machine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared"))


def test_no_two_trials_have_one_name() -> None:
    names = [trial.name for trial in TRIALS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("trial", [trial for trial in TRIALS if trial.quick], ids=lambda trial: trial.name)
def test_a_quick_trial(trial: Trial, shared: Shared, tmp_path: Path) -> None:
    """A user's mistake ends in one clear message."""
    run(trial, shared, tmp_path)


def run(trial: Trial, shared: Shared, tmp_path: Path) -> None:
    try:
        outcome, found = try_it(trial, shared, tmp_path / "trial", patience=BUSY)
    except CannotBeTried as reason:
        pytest.skip(str(reason))
    assert not found, f"{trial.name}: {'; '.join(found)}\n{outcome.text[-4000:]}"
