"""An adapter is trained as Hugging Face with PEFT trains it, at every layout, and resumed exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.peft_models import PROJECTOR, TEXT, TOWER, make_peft_folder, train_peft, used_linears
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world

LAYOUTS: list[Any] = [
    (1, 1, 1),
    (2, 2, 1),
    (1, 1, 2),
    pytest.param((2, 1, 1), marks=pytest.mark.long),
    pytest.param((1, 2, 1), marks=pytest.mark.long),
]
"""tp (with sequence parallelism), pp, dp (with the distributed optimizer)."""
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
DECAY, TEXT_ONLY = 0.01, {1, 3, 4, 5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, imported, and PEFT's adapters on it: every linear layer of every part, ranks that differ by part."""
    root = tmp_path_factory.mktemp("adapters")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    targets = used_linears(root / "hf", [TOWER, PROJECTOR, TEXT])
    for name, options in KINDS.items():
        make_peft_folder(
            root / "hf", root / name, r=4, lora_alpha=8, target_modules=targets,
            rank_pattern={".*vision_tower.*": 2, "linear_1": 3}, **options,
        )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def results(folders: Path) -> Callable[[Any], Any]:
    """Returns the curves of a layout."""

    @functools.cache
    def curves(layout: tuple[int, int, int]) -> Any:
        tp, pp, dp = layout
        ranks = run_world(
            tp * pp * dp, "tests.parallel.adapter_checks:curves", tp=tp, pp=pp, dp=dp,
            checkpoint=str(folders / "megatron"), adapters={name: str(folders / name) for name in KINDS},
            save_dir=str(folders / "save"),
        )  # fmt: skip
        assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
        return ranks[0]

    return curves


@pytest.fixture(scope="module")
def peft(folders: Path, results: Any) -> dict[str, Any]:
    """The same curves by PEFT."""
    rates = results((1, 1, 1))["lora"]["lr"]
    return {name: train_peft(folders / "hf", folders / name, rates, decay=DECAY, text_only=TEXT_ONLY) for name in KINDS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_peft(results: Any, peft: Any, kind: str, layout: tuple[int, int, int]) -> None:
    here, reference = results(layout)[kind], peft[kind]
    assert len(here["loss"]) == 20 and here["loss"][-1] < 0.95 * here["loss"][0]
    assert here["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert here["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_and_recomputation_change_nothing(results: Any, layout: tuple[int, int, int]) -> None:
    here, reference = results(layout), results((1, 1, 1))
    assert here["packed"]["loss"] == pytest.approx(reference["recomputed"]["loss"], rel=1e-5)
    assert here["recomputed"]["loss"] == pytest.approx(reference["recomputed"]["loss"], rel=1e-6)
    assert here["recomputed"]["grad_norm"] == pytest.approx(reference["recomputed"]["grad_norm"], rel=1e-5)
    assert here["bf16"]["loss"] == pytest.approx(reference["recomputed"]["loss"], rel=5e-3)
    assert here["pictures only"]["loss"] == pytest.approx(reference["pictures only"]["loss"], rel=1e-6)


def test_resumed_exactly_and_at_another_layout(folders: Path) -> None:
    """DoRA on some layers of two parts, two modules trained in full; the checkpoint holds no more than these."""
    arguments: dict[str, Any] = {"checkpoint": str(folders / "megatron"), "save_dir": str(folders / "resumed")}
    function = "tests.parallel.adapter_checks:save_and_resume"
    found = run_world(4, function, tp=2, pp=1, hf=str(folders / "hf"), **arguments)[0]
    assert found["resumed"] == found["expected"], "the same layout continues bitwise"
    trained, buffers = found["sizes"]
    assert trained <= buffers < 1.1 * trained, "nothing that is frozen has a gradient"
    saved = latest_checkpoint(folders / "resumed" / "adapter")[0]
    assert {path.name for path in saved.rglob("*.safetensors")} == set()
    elsewhere = run_world(2, "tests.parallel.adapter_checks:resume_elsewhere", tp=1, pp=2, **arguments)[0]
    assert elsewhere == pytest.approx(found["expected"], rel=1e-5)
