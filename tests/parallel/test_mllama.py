"""Mllama trains the same at every layout that it can have, packed and padded, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_mllama import image, make_hf_mllama
from tests.helpers.world import run_world
from tests.parallel import mllama_checks
from tests.parallel.any_size_checks import MORE_STEPS, SAVED_AFTER

NUM_SAMPLES = 24
SIZES = ((28, 28), (30, 90), (70, 31), (60, 50))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint, and samples about images of one to four tiles, every fifth about none."""
    root: Path = tmp_path_factory.mktemp("mllama")
    make_hf_mllama(root / "hf")
    import_hf(root / "hf", root / "megatron")
    parts = {i: {"jpg": None, "png": image(*SIZES[i % len(SIZES)], seed=i)} for i in range(NUM_SAMPLES)}
    parts |= {i: {"jpg": None} for i in range(0, NUM_SAMPLES, 5)}
    make_dataset(root / "data", num_samples=NUM_SAMPLES, replace=parts, sample_type="CrudeWebdataset")
    case = {"hf": str(root / "hf"), "checkpoint": str(root / "megatron"), "data": str(root / "data")}
    return {"case": case, "save_dir": str(root / "runs")}


@pytest.mark.long
def test_every_layout_trains_alike(material: dict[str, Any]) -> None:
    (one,) = run_world(1, mllama_checks.train, tp=1, **material)
    assert all(curve["loss"][-1] < curve["loss"][0] for curve in one.values())
    assert one["recomputed"]["loss"] == pytest.approx(one["packed"]["loss"], rel=1e-6)
    here, other = run_world(2, mllama_checks.train, tp=2, **material)
    assert here["packed"]["loss"] == other["packed"]["loss"], "ranks disagree about the loss"
    for name, curve in here.items():
        expected = one[name if name in one else "LoRA" if "LoRA" in name else "packed"]
        assert curve["tokens"] == expected["tokens"] and curve["tiles"] == expected["tiles"]
        assert curve["loss"] == pytest.approx(expected["loss"], rel=1e-5), name
        assert curve["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), name
        assert curve["grad_norm"][0] == pytest.approx(expected["grad_norm"][0], rel=1e-5), name


@pytest.mark.long
def test_it_resumes_bit_for_bit(material: dict[str, Any]) -> None:
    """A run with a stop has the losses, gradient norms and weights of one without, with the distributed optimizer."""
    for rank, run in enumerate(run_world(4, mllama_checks.resume, tp=2, **material)):
        assert run["found"] == run["expected"] and not run["different"] and not run["unchanged"], rank
        assert len(set(run["expected"]["loss"][1:])) == SAVED_AFTER + MORE_STEPS - 1
