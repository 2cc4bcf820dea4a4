"""Mixtures of experts on GPUs: torch's grouped product, and whole runs with Transformer Engine's other layers."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.import_hf import import_hf
from tests.gpu import expert_checks
from tests.gpu.test_graphs import assert_same
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel.expert_checks import Layout, losses_in_bf16
from tests.unit.models import test_grouped_fp8
from tests.unit.models.test_grouped_product import COUNTS, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYOUTS: dict[Layout, int] = {(1, 1, 1, 1): 1, (1, 1, 2, 1): 2, (2, 1, 2, 1): 2, (2, 1, 1, 2): 2}


@pytest.mark.parametrize("counts", [*COUNTS, [0, 700, 4000, 3]], ids=str)
def test_grouped_product(counts: list[int]) -> None:
    check(counts, "cuda")


@pytest.mark.parametrize("counts", [*COUNTS, [0, 700, 4000, 3], [16, 33, 1, 128]], ids=str)
def test_grouped_product_in_fp8(counts: list[int]) -> None:
    test_grouped_fp8.check(counts, "cuda")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    # The kernels need rows of 16 bytes.
    make_hf_llava(root / "hf", text="qwen3_moe", text_overrides={"moe_intermediate_size": 32})
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bf16_is_close_to_fp32(checkpoint: Path, tmp_path: Path, layout: Layout) -> None:
    """Each layout, with Transformer Engine's layers and with torch's, against fp32 in one process."""
    if LAYOUTS[layout] > torch.cuda.device_count():
        pytest.skip("too few GPUs")
    given: dict[str, Any] = {"checkpoint": str(checkpoint), "save_dir": str(tmp_path / "save")}
    found = run_world(LAYOUTS[layout], losses_in_bf16, layout=layout, **given)[0]
    for impl in ("local", "transformer_engine"):
        assert found[impl] == pytest.approx(found["fp32"], rel=1e-2), impl


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_graphs_of_attention_and_routers_change_no_number(checkpoint: Path, tmp_path: Path, layout: Layout) -> None:
    if LAYOUTS[layout] > torch.cuda.device_count():
        pytest.skip("too few GPUs")
    given: dict[str, Any] = {"checkpoint": str(checkpoint), "save_dir": str(tmp_path / "save")}
    found = run_world(LAYOUTS[layout], expert_checks.with_and_without_graphs, layout=layout, **given)[0]
    for curves in found.values():
        assert_same(curves)


@pytest.mark.parametrize("layout", [*LAYOUTS, (1, 2, 1, 1), (1, 2, 2, 1)], ids=str)
def test_optimizers_and_stages(checkpoint: Path, tmp_path: Path, layout: Layout) -> None:
    """A precision-aware optimizer, one on the host, saves on own disks, interleaved stages and FP8: near the plain
    run's losses, and resumed bit for bit."""
    tp, pp, ep, _ = layout
    size = max(tp, ep) * pp
    if size > torch.cuda.device_count():
        pytest.skip("too few GPUs")
    given: dict[str, Any] = {"checkpoint": str(checkpoint), "save_dir": str(tmp_path / "save")}
    given["hf"] = str(hf_folder(iteration_folder(checkpoint, 0)))
    found = run_world(size, expert_checks.save_and_resume, layout=layout, **given)[0]
    begun, uninterrupted, _ = found["plain"]
    for name, (losses, after, resumed) in found.items():
        assert [*losses, *after] == pytest.approx([*begun, *uninterrupted], rel=2e-2), name
        assert resumed == after, name


def test_adapters_in_fp8(checkpoint: Path, tmp_path: Path) -> None:
    """Without a 16-bit copy of what is frozen: the same bits."""
    found = run_world(1, expert_checks.adapters_in_fp8, checkpoint=str(checkpoint), save_dir=str(tmp_path / "save"))[0]
    assert found["fp8"] == pytest.approx(found["bf16"], rel=2e-2)
    assert found["only fp8"] == found["fp8"]
