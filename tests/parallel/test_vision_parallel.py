"""Towers that every tensor-parallel rank has whole, for a part of the images: nothing of a step changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.convert.check import check_folder
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.world import run_world
from tests.parallel import vision_parallel_checks
from tests.parallel.test_layouts import assert_same_folder
from tests.parallel.tiny_models import CLASSES, Cases, assert_same_gradients, make_cases


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return make_cases(tmp_path_factory.mktemp("vision"), CLASSES)


def test_losses_and_gradients_are_those_of_one_rank(cases: Cases, tmp_path: Path) -> None:
    arguments = {"cases": cases, "save_dir": str(tmp_path)}
    (one,) = run_world(1, vision_parallel_checks.gradients, tp=1, pp=1, **arguments)
    two = run_world(2, vision_parallel_checks.gradients, tp=2, pp=1, **arguments)
    for (name, variant), expected in one.items():
        for rank in (0, 1):
            found, where = two[rank][name, variant], (name, variant, rank)
            losses, norm = torch.tensor(expected["losses"]), expected["norm"]
            assert torch.allclose(torch.tensor(found["losses"]), losses, rtol=1e-5, atol=0.0), where
            assert norm > 0 and found["norm"] == pytest.approx(norm, rel=1e-5), where
            of_both = expected["gradients"], found["gradients"]
            assert_same_gradients(cases[name], *of_both, tp=2, tp_rank=rank, where=where, whole_tower=True)


@pytest.mark.long
def test_steps_are_those_of_one_rank(cases: Cases, tmp_path: Path) -> None:
    """With two pipeline stages, and with two replicas of the model."""
    others = {name: cases[name] for name in ("qwen2_5_vl", "qwen3_vl", "audio")}
    arguments: dict[str, Any] = {"llava": cases["llava"]["checkpoint"], "save_dir": str(tmp_path)}
    (one,) = run_world(1, vision_parallel_checks.curves, tp=1, pp=1, cases=others, **arguments)
    for pp, chosen in ((2, others), (1, {})):
        ranks = run_world(4, vision_parallel_checks.curves, tp=2, pp=pp, cases=chosen, **arguments)
        assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
        assert ranks[0].keys() == one.keys() - (others.keys() - chosen.keys())
        for run, found in ranks[0].items():
            loss, norm = (1e-2, 5e-2) if run == "bf16" else (1e-5, 1e-3)
            assert found["loss"] == pytest.approx(one[run]["loss"], rel=loss), run
            assert found["grad_norm"] == pytest.approx(one[run]["grad_norm"], rel=norm), run
            assert found["loss"][-1] < found["loss"][0], run


def test_checkpoints_load_with_and_without_the_option(cases: Cases, tmp_path: Path) -> None:
    arguments = {"checkpoint": cases["llava"]["checkpoint"], "save_dir": str(tmp_path)}
    ranks = run_world(2, vision_parallel_checks.switch, tp=2, pp=1, **arguments)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 4
    for name, (resumed, uninterrupted) in ranks[0].items():
        assert resumed == pytest.approx(uninterrupted, rel=1e-5), name


def test_an_import_is_exported_bit_for_bit(cases: Cases, tmp_path: Path) -> None:
    chosen = {name: cases[name]["checkpoint"] for name in ("qwen2_5_vl", "llava_onevision", "audio")}
    chosen["qwen2_5_vl"] = str(tmp_path / "import")  # for as many ranks as train
    import_hf(Path(cases["qwen2_5_vl"]["hf"]), tmp_path / "import", tensor_parallel=2, verify=True)
    summary = check_folder(Path(cases["qwen2_5_vl"]["hf"]), tp=2, pp=1)
    assert summary.endswith("fits tp 2 x pp 1 with --vision-data-parallel")
    run_world(2, vision_parallel_checks.save_unchanged, tp=2, pp=1, checkpoints=chosen, save_dir=str(tmp_path))
    for name in chosen:
        export_hf(tmp_path / name, tmp_path / f"{name}-hf", tensor_parallel=2, pipeline_parallel=1, verify=True)
        assert_same_folder(Path(cases[name]["hf"]), tmp_path / f"{name}-hf")


def test_ranks_draw_other_dropout_for_their_pictures_and_stay_together(cases: Cases, tmp_path: Path) -> None:
    """A rank draws in the tower for its own images alone, which must not move the numbers that all ranks share."""
    arguments = {"case": cases["qwen2_5_vl"], "save_dir": str(tmp_path)}
    first, second = run_world(2, vision_parallel_checks.with_dropout, tp=2, pp=1, **arguments)
    assert torch.equal(first["random"], second["random"])
    assert any(name.startswith("vision_model.") for name in first["alike"])
    assert all(torch.equal(x, second["alike"][name]) for name, x in first["alike"].items())
