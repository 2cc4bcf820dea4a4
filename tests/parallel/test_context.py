"""Ranks that divide the tokens of every sample (`--cp`) compute what one rank does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.helpers.world import run_world
from tests.parallel import context_checks
from tests.parallel.context_checks import DIVIDED, PACKED, PADDED, REPEATED, Layout
from tests.parallel.test_experts import few_samples
from tests.parallel.tiny_models import CLASSES as EVERY_CLASS
from tests.parallel.tiny_models import OF_PICTURES, OF_QWEN, Cases, TinyModel, assert_same_gradients, make_cases

DIVISIBLE = {name: TinyModel(partial(make_hf_qwen, name=name), OF_QWEN) for name in ("qwen2_5_vl", "qwen3_vl")}
"""Their towers can be divided over two ranks."""
GEMMAS = {
    "gemma2": TinyModel(partial(make_hf_llava, text="gemma2"), OF_PICTURES),
    "gemma3": TinyModel(partial(make_hf_llava, vision="siglip", text="gemma3"), OF_PICTURES),
}
"""Their attention has windows and soft caps."""
DELTA_NETS = {"qwen3_5": TinyModel(partial(make_hf_qwen, name="qwen3_5", seed=1), OF_QWEN)}
CLASSES = EVERY_CLASS | DIVISIBLE | GEMMAS | DELTA_NETS
ONE: Layout = (1, 1, 1)
LAYOUTS: list[Layout] = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]
"""tp, cp, pp."""
OF_FOUR_RANKS = DIVISIBLE | GEMMAS | DELTA_NETS
"""Classes that four ranks divide: what the others do with their tokens is the same with two."""
RANKS = {layout: layout[0] * layout[1] * layout[2] for layout in [ONE, *LAYOUTS]}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return make_cases(tmp_path_factory.mktemp("context"), CLASSES)


@pytest.fixture(scope="module")
def whole(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and gradients of one rank."""
    save_dir = str(tmp_path_factory.mktemp("one"))
    found: dict[str, Any] = run_world(1, context_checks.gradients, layout=ONE, cases=cases, save_dir=save_dir)[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_those_of_one_rank(
    cases: Cases, whole: dict[str, Any], tmp_path: Path, layout: Layout
) -> None:
    # Without tensor parallelism ranks divide images by themselves, unless the run says no (in the pipeline's world). A
    # pipeline's micro-batches have as many rows, so they are packed.
    cases = {name: case for name, case in cases.items() if layout != (1, 4, 1) or name in OF_FOUR_RANKS}
    kinds = (PACKED, PADDED, *((DIVIDED,) if layout[0] > 1 else ())) if layout[2] == 1 else (REPEATED,)
    arguments = {"layout": layout, "cases": cases, "save_dir": str(tmp_path), "kinds": kinds}
    ranks = run_world(RANKS[layout], context_checks.gradients, **arguments)
    if layout == (1, 4, 1):  # with groups of two neighbors
        levels = [rank["levels"] for rank in ranks]
        assert levels == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    for name, case in cases.items():
        for kind in kinds:
            expected, where = whole[name, PADDED if kind == PADDED else PACKED], (layout, name, kind)
            losses = sum_of_losses(ranks, layout, (name, kind))
            assert torch.allclose(losses, torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-6), where
            for rank in ranks:
                assert rank[name, kind]["norm"] == pytest.approx(expected["norm"], rel=1e-5), where
                of_both = expected["gradients"], rank[name, kind]["gradients"]
                place: dict[str, Any] = {"tp": layout[0], "tp_rank": rank["tp_rank"], "has_all": layout[2] == 1}
                assert_same_gradients(case, *of_both, where=where, whole_tower=kind == DIVIDED, **place)


def sum_of_losses(ranks: list[dict[Any, Any]], layout: Layout, key: tuple[str, str]) -> Tensor:
    """Return loss and trained tokens of each micro-batch: every context-parallel rank has those of its own tokens."""
    last = [rank for rank in ranks if rank["pp_rank"] == layout[2] - 1 and rank["tp_rank"] == 0]
    assert len(last) == layout[1]
    return torch.stack([torch.tensor(rank[key]["losses"]) for rank in last]).sum(0)


def test_steps_validations_and_answers_are_those_of_one_rank(cases: Cases, tmp_path: Path) -> None:
    """With every option, and with two replicas of two ranks."""
    data = few_samples(tmp_path / "data", 18)
    arguments = {"cases": cases, "data": str(data), "save_dir": str(tmp_path)}
    (one,) = run_world(1, context_checks.curves, layout=ONE, **arguments)
    for size, layout in ((4, (1, 2, 1)), (4, (1, 2, 2))):
        ranks = run_world(size, context_checks.curves, layout=layout, **arguments)
        assert all(rank["curves"] == ranks[0]["curves"] for rank in ranks), "ranks disagree about the loss"
        assert ranks[0]["curves"].keys() == one["curves"].keys()
        for name, found in ranks[0]["curves"].items():
            loss, norm = (1e-2, 5e-2) if name == "bf16" else (1e-5, 1e-4)
            expected = one["curves"][name]
            assert found["loss"] == pytest.approx(expected["loss"], rel=loss), (layout, name)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm), (layout, name)
            assert len(set(found["loss"])) == len(found["loss"]), (layout, name)
        for key, result in ranks[0]["measured"].items():
            expected = one["measured"][key]
            if "answers" in key:
                assert result == expected and len(expected) == 15, (layout, key)
                assert any(record.answer for record in result), key
            else:
                assert result[0] == pytest.approx(expected[0], rel=1e-5) and result[1:] == expected[1:], (layout, key)


def test_a_stopped_run_continues_bit_for_bit_and_at_other_layouts(cases: Cases, tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", num_samples=24)
    case = cases["qwen2_5_vl"] | {"data": str(tmp_path / "data")}
    arguments = {"case": case, "save_dir": str(tmp_path / "runs")}
    ranks = run_world(4, context_checks.stop_and_resume, layout=(1, 2, 1), **arguments)  # with two replicas
    for rank in ranks:
        assert rank["found"] == rank["expected"] and not rank["different"]
    expected = {key: values[context_checks.SAVED_AFTER :] for key, values in ranks[0]["expected"].items()}
    for layout in (ONE, (1, 4, 1), (2, 2, 1)):
        found = run_world(RANKS[layout], context_checks.resume_elsewhere, layout=layout, **arguments)[0]
        assert found["tokens"] == expected["tokens"], "the same packs"
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5), layout
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), layout
