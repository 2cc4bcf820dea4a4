"""The load of experts in the log, and the warning about those that starve."""

from __future__ import annotations

import pytest

from llava_mcore.training.logs.expert_loads import StarvedExperts, load_sums


def test_busiest_and_idlest() -> None:
    sums = load_sums([[10, 10, 10, 10], [0, 0, 0, 0], [40, 0, 20, 20]])
    assert sums == {"max_expert_load": (pytest.approx(1 + 2), 2), "min_expert_load": (pytest.approx(1 + 0), 2)}
    assert load_sums([]) == {}


def test_a_starved_expert_is_named_once() -> None:
    starved = StarvedExperts()
    assert starved.check(1, [[0, 0], [900, 4]]) is None, "too few tokens to tell"
    warning = starved.check(2, [[0, 0], [1600, 5]])
    assert warning is not None and "1 experts" in warning and "layer 1 expert 1" in warning
    assert "iterations 1 to 2" in warning and "router.aux_loss_coef" in warning
    assert starved.check(3, [[0, 0], [2000, 5]]) is None, "it has been named"
    assert starved.check(4, [[0, 0], [1000, 1000]]) is None
    assert starved.check(5, [[0, 0], [2000, 5]]) is not None, "it had recovered"
