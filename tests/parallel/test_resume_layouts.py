"""A run saved at one layout continues at any other, with either optimizer, also with another data-parallel size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import resume_checks

Layout = tuple[int, int, int]
CASES: list[Any] = [
    (True, (1, 2, 2), [(2, 1, 2), (1, 2, 2)]),  # the first and the last stage hold the same embedding
    pytest.param(False, (2, 2, 2), [(1, 2, 1), (1, 1, 2), (2, 2, 1), (4, 1, 2), (2, 2, 2)], marks=pytest.mark.long),
]


@pytest.mark.parametrize(("tied", "saved_at", "resumed_at"), CASES, ids=["tied", "untied"])
def test_resumed_at_another_layout(tmp_path: Path, tied: bool, saved_at: Layout, resumed_at: list[Layout]) -> None:
    make_hf_llava(tmp_path / "hf", tie=tied)
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments: dict[str, Any] = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path / "save")}
    tp, pp, dp = saved_at
    source = {"tp": tp, "pp": pp, "hf": str(tmp_path / "hf")}
    expected = run_world(tp * pp * dp, resume_checks.train_and_save, **source, **arguments)[0]
    for tp, pp, dp in resumed_at:
        layout = {"tp": tp, "pp": pp}
        found = run_world(tp * pp * dp, resume_checks.resume_and_train, **layout, **arguments)[0]
        for name, losses in expected.items():
            assert found[name] == pytest.approx(losses, rel=1e-5), (tp, pp, dp, name)
        if (tp, pp, dp) == saved_at:
            assert found == expected, "the same layout continues bitwise"
