"""A run saved at one layout continues at any other, with either optimizer, also with another data-parallel size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.apps.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world

SAVED_AT = (2, 1, 2)
RESUMED_AT = [(1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]


def test_resumed_at_another_layout(tmp_path: Path) -> None:
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments: dict[str, Any] = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path / "save")}
    tp, pp, dp = SAVED_AT
    source = {"tp": tp, "pp": pp, "hf": str(tmp_path / "hf")}
    expected = run_world(tp * pp * dp, "tests.parallel.resume_checks:train_and_save", **source, **arguments)[0]
    for tp, pp, dp in RESUMED_AT:
        layout = {"tp": tp, "pp": pp}
        found = run_world(tp * pp * dp, "tests.parallel.resume_checks:resume_and_train", **layout, **arguments)[0]
        for name, losses in expected.items():
            assert found[name] == pytest.approx(losses, rel=1e-5), (tp, pp, dp, name)
        if (tp, pp, dp) == SAVED_AT:
            assert found == expected, "the same layout continues bitwise"
