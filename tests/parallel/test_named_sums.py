"""Loss terms and named sums are the same at every layout."""

from __future__ import annotations

from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import named_sums_checks

LAYOUTS = [(2, 1, 1), (1, 2, 2)]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sums")
    make_hf_llava(folder / "hf")
    import_hf(folder / "hf", folder / "megatron")
    return {"checkpoint": str(folder / "megatron"), "save_dir": str(folder / "save")}


@pytest.fixture(scope="module")
def alone(given: dict[str, str]) -> list[dict[str, Any]]:
    [found] = run_world(1, named_sums_checks.train_with_terms, tp=1, pp=1, **given)
    return found["padded"]


def test_a_term_is_reported_and_its_metric_equals_it(alone: list[dict[str, Any]]) -> None:
    for step in alone:
        assert step["sums"]["z_loss"] == step["sums"]["z"]
        assert step["sums"]["z_loss"][1] == step["trained"]
    assert alone[0]["sums"]["size"][1] == 4 * 48 * 2, "four layers, 48 tokens, two micro-batches"


def test_losses_of_datasets_add_up_to_the_loss(alone: list[dict[str, Any]]) -> None:
    for step in alone:
        (even, num_even), (odd, num_odd) = (step["sums"][f"loss/{name}"] for name in named_sums_checks.DATASETS)
        assert num_even + num_odd == step["trained"] and num_even != num_odd
        assert even + odd == pytest.approx(step["loss"] * step["trained"], rel=1e-5)
        assert even / num_even != pytest.approx(odd / num_odd, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_terms_equal_those_of_one_process(
    alone: list[dict[str, Any]], given: dict[str, str], layout: tuple[int, int, int]
) -> None:
    tp, pp, dp = layout
    ranks = run_world(tp * pp * dp, named_sums_checks.train_with_terms, tp=tp, pp=pp, **given)
    assert all(rank == ranks[0] for rank in ranks)
    for name, found in ranks[0].items():
        for mine, right in zip(found, alone, strict=True):
            assert mine["loss"] == pytest.approx(right["loss"], rel=1e-5), name
            assert mine["norm"] == pytest.approx(right["norm"], rel=1e-5), name
            for key, (total, count) in right["sums"].items():
                assert mine["sums"][key][0] == pytest.approx(total, rel=1e-5), (name, key)
                more = right["micro_batch_size"] // mine["micro_batch_size"] if key == "size" else 1
                assert mine["sums"][key][1] == more * count, (name, key)
