"""Checkpoints whose tensors are on the nodes' own disks: resumed bitwise, or not used with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import local_checks
from tests.parallel.resume_checks import STEPS

LAST = f"iter_{3 * STEPS:07d}"
"""The third save."""


@pytest.mark.parametrize(("tp", "pp", "tied"), [(2, 1, False), (1, 2, True)])
def test_a_run_goes_on_from_the_nodes_own_disks(tmp_path: Path, tp: int, pp: int, tied: bool) -> None:
    make_hf_llava(tmp_path / "hf", tie=tied)
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments: dict[str, Any] = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path / "save")}
    layout = {"tp": tp, "pp": pp, "hf": str(tmp_path / "hf")}
    results = run_world(4, local_checks.saved_on_own_disks, **layout, **arguments)
    for rank, result in enumerate(results):
        for name, found in result.items():
            assert found["resumed"] == (2 * STEPS, found["uninterrupted"]), (rank, name)
            wider, other = found["elsewhere"]
            assert f"for tp {tp}, pp {pp}, dp 2" in wider and f"this run has tp {tp + 1}, pp {pp}, dp 2" in wider
            whole = tp > 1 and name == "distributed"
            assert f"vision_data_parallel {whole}; this run has" in other and f"_parallel {not whole}" in other
            assert "could not be written" in found["message"] and "rank_00003.pt" in found["message"]
            node = (0, 1) if rank < 2 else (2, 3)
            assert [file[-13:-3] for file in found["disk"]] == [f"rank_{x:05d}" for x in node], found["disk"]
            assert all(file.startswith(f"{LAST}.") for file in found["disk"])
            for what, reason in (
                ("flipped", "is damaged"),
                ("short", "bytes, "),
                ("gone", "is not on this node's disk"),
            ):
                iteration, passed_over = found[what]
                assert iteration == STEPS
                assert "rank 3: " in passed_over[0] and LAST in passed_over[0] and reason in passed_over[0]
            assert "no complete checkpoint" in found["damaged"] and "is damaged: xxh3_64" in found["damaged"]
            assert f"iter_{STEPS:07d}" in found["damaged"] and found["not_verified"] == STEPS
    shared = tmp_path / "save" / "plain" / "non_persistent" / LAST
    names = {path.name for path in shared.iterdir()}
    assert {"local.json", "run.yaml", "run.json"} <= names and not [x for x in names if x.endswith((".distcp", ".pt"))]
