"""--tp-comm-overlap: the numbers of the same run without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llava_mcore.convert.import_hf import import_hf
from tests.gpu import overlap_checks
from tests.gpu.test_graphs import assert_same
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="messages need two GPUs"),
]


def test_overlap_changes_no_number(tmp_path: Path) -> None:
    """Within the rounding of sums whose order is not fixed, of full passes and of those of other sizes."""
    make_hf_llava(tmp_path / "hf", text_overrides={"hidden_size": 256, "intermediate_size": 512})
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path)}
    found = run_world(2, overlap_checks.curves, **arguments)[0]
    assert found.keys() == {*overlap_checks.CASES, *overlap_checks.OTHER_SIZES}
    for name, runs in found.items():
        print(name)
        assert_same(runs)
