"""Classes with experts of their own, towers and shared experts among them, train as transformers' own with AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import WITH_EXPERTS
from tests.helpers.world import run_world
from tests.parallel import expert_class_checks
from tests.parallel.expert_checks import Layout
from tests.parallel.expert_class_checks import Curves
from tests.parallel.test_class_curves import Trained, their_curve

ONE: Layout = (1, 1, 1, 1)
LAYOUTS: dict[Layout, int] = {ONE: 1, (2, 1, 2, 1): 2, (2, 2, 1, 2): 4}
"""tp, pp, ep, etp, and the number of processes."""
STEPS = 4
TRAINED = {name: Trained(name, num_steps=STEPS) for name in WITH_EXPERTS}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Layout, Curves], dict[str, Path]]:
    """Losses and gradient norms of every layout, and the models' folders."""
    root = tmp_path_factory.mktemp("expert-classes")
    cases: dict[str, dict[str, Any]] = {}
    for name, trained in TRAINED.items():
        trained.make(root / name)
        import_hf(root / name, root / f"{name}-megatron")
        cases[name] = {"hf": str(root / name), "checkpoint": str(root / f"{name}-megatron"), "steps": trained.steps()}
    given: dict[str, Any] = {"cases": cases, "save_dir": str(root / "runs"), "most_steps": STEPS}
    found = {x: run_world(size, expert_class_checks.train, layout=x, **given)[0] for x, size in LAYOUTS.items()}
    return found, {name: root / name for name in TRAINED}


@pytest.mark.parametrize("name", TRAINED)
def test_steps_are_those_of_transformers_and_adamw(curves: Any, name: str) -> None:
    of_layouts, folders = curves
    losses, norms = their_curve(folders[name], TRAINED[name], of_layouts[ONE][name]["lr"])
    for layout, found in of_layouts.items():
        assert found[name]["loss"] == pytest.approx(losses, rel=1e-5), layout
        assert found[name]["grad_norm"][0] == pytest.approx(norms[0], rel=1e-5), layout
        assert found[name]["grad_norm"] == pytest.approx(norms, rel=1e-3), layout


@pytest.mark.parametrize("name", TRAINED)
def test_adapters_of_shared_and_other_experts(curves: Any, name: str) -> None:
    """The same where tensor-parallel ranks divide what all tokens share, and the experts among them."""
    of_layouts, _ = curves
    expected = of_layouts[ONE][f"{name}, adapters"]
    found = of_layouts[2, 1, 2, 1][f"{name}, adapters"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert expected["loss"][-1] < expected["loss"][0]


def test_answers_where_replicas_write_different_numbers_of_tokens(tmp_path: Path) -> None:
    """Each replica of two processes has all experts: the answers, and the losses around them, of one process."""
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    make_dataset(tmp_path / "data", num_samples=32)
    split = "split_parts: {train: [000001.tar], val: [000000.tar], test: []}\nexclude: []\n"
    (tmp_path / "data" / ".nv-meta" / "split.yaml").write_text(split)
    given = {"checkpoint": str(tmp_path / "megatron"), "data": str(tmp_path / "data"), "save_dir": str(tmp_path)}
    answers = expert_class_checks.answers_while_training
    one, four = (run_world(size, answers, layout=x, **given)[0] for x, size in ((ONE, 1), ((2, 1, 2, 1), 4)))
    assert four["rounds"][0] == one["rounds"][0] and len(one["rounds"][0][1]) == 15
    assert four["losses"][0] == pytest.approx(one["losses"][0], rel=1e-5)
