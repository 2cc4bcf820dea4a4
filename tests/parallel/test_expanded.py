"""Inserted layers alone are trained, at several layouts; the others keep their bits, through training and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.build.expand import expand_folder
from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.files.hf_folder import HfFolder
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import expanded_checks
from tests.parallel.resume_checks import STEPS

NEW = ("language_model.model.layers.2.", "language_model.model.layers.5.")


def test_only_inserted_layers_change(tmp_path: Path) -> None:
    make_hf_llava(tmp_path / "hf")
    expand_folder(tmp_path / "hf", tmp_path / "more", "every:2", print)
    import_hf(tmp_path / "more", tmp_path / "megatron")
    given: dict[str, Any] = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path / "runs")}
    given["hf"] = str(hf_folder(latest_checkpoint(tmp_path / "megatron")[0]))
    (one,) = run_world(1, expanded_checks.train, tp=1, pp=1, name="one", **given)
    many = run_world(4, expanded_checks.train, tp=2, pp=2, name="many", **given)
    assert one["losses"][0] > one["losses"][-1]
    for ranks in (many, [one]):
        for rank in ranks:
            assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
            assert rank["resumed"] == rank["losses"][STEPS:], "bit for bit"
    start = HfFolder.open(tmp_path / "more")
    for name in ("one", "many"):
        export_hf(tmp_path / "runs" / name, tmp_path / f"{name}-hf", verify=True)
        trained = HfFolder.open(tmp_path / f"{name}-hf")
        assert trained.tensors.keys() == start.tensors.keys()
        changed = {x for x in start.tensors if not torch.equal(start.get(x), trained.get(x))}
        assert changed and all(x.startswith(NEW) for x in changed)
        outputs = {
            x for x in trained.tensors if x.startswith(NEW) and x.endswith(("o_proj.weight", "down_proj.weight"))
        }
        assert len(outputs) == 4 and outputs <= changed
