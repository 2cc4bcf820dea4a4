"""Runs in which a pipeline stage, a data-parallel rank or some layers train nothing are resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import frozen_checks

LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "fused"),
    [(1, 2, 2, False), pytest.param(1, 1, 2, True, marks=LONG)],
)
def test_frozen_parts_are_saved_and_resumed(tmp_path: Path, tp: int, pp: int, dp: int, fused: bool) -> None:
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments = {
        "checkpoint": str(tmp_path / "megatron"),
        "save_dir": str(tmp_path / "save"),
        "hf": str(tmp_path / "hf"),
        "fused": fused,
    }
    ranks = run_world(tp * pp * dp, frozen_checks.save_and_resume, tp=tp, pp=pp, **arguments)
    for rank in ranks:
        for name, (uninterrupted, resumed) in rank.items():
            assert resumed == uninterrupted, name
