"""`--memory-snapshot`, and the snapshot that a run writes when a GPU's memory has run out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from llava_mcore.convert.import_hf import import_hf
from tests.gpu import memory_checks
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dist_optim", [False, True])
def test_memory_by_category(tmp_path: Path, dist_optim: bool) -> None:
    make_hf_llava(tmp_path / "hf", text_overrides={"hidden_size": 128, "intermediate_size": 256})
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path / "save"), "dist_optim": dist_optim}
    (result,) = run_world(1, memory_checks.memory, **arguments)
    peak = result["at peak"]
    print({name: size for name, size in result.items() if name != "image"})
    # bf16 weights, fp32 gradients, and an fp32 copy with two moments: 2 + 4 + 12 bytes per parameter, with rounding.
    assert peak["gradients"] == pytest.approx(2 * peak["weights"], rel=0.2)
    assert peak["optimizer state"] == pytest.approx(6 * peak["weights"], rel=0.2)
    assert {"vision tower", "language model", "backward pass"} <= set(result["categories"])
    assert result["events"] > 100 and result["at end"] <= result["reserved"] <= 2 * result["torch's reserved"]
    with Image.open(io.BytesIO(result["image"])) as image:
        assert image.size == (1320, 880)
    assert result["files"] == ["rank_00000.out_of_memory_1.pickle", "rank_00000.out_of_memory_1.png"]
    assert "out of GPU memory in iteration 1" in result["error"]
    assert "memory: " in result["error"] and "rank_00000.out_of_memory_1.png" in result["error"]
