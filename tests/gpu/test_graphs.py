"""CUDA graphs of layers: the numbers of the same run without them, and resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.import_hf import import_hf
from tests.gpu import graph_checks
from tests.gpu.graph_checks import KINDS, TOWERS, WHOLE, Curve
from tests.gpu.te_checks import RECIPES
from tests.gpu.test_context import WIDE
from tests.helpers.packages import needs
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import ROPE, make_hf_qwen
from tests.helpers.world import run_world

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("graphs")
    make_hf_llava(root / "hf", text_overrides={"hidden_size": 128, "intermediate_size": 256})
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


LAYOUTS = [(tp, dp) for tp, dp in ((1, 1), (2, 1), (1, 2), (2, 2)) if tp * dp <= torch.cuda.device_count()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_graphs_change_no_number(checkpoint: Path, tmp_path: Path, tp: int, dp: int, kind: str) -> None:
    """Within the rounding of sums whose order is not fixed. The second step captures, later ones replay."""
    if kind == "nf4":
        needs("bitsandbytes")
    arguments = {"tp": tp, "kind": kind, "checkpoint": str(checkpoint), "save_dir": str(tmp_path)}
    assert_same(run_world(tp * dp, graph_checks.curves, **arguments)[0])


@pytest.mark.parametrize("kind", ["all trained", "lora", "delayed", "tensorwise"])
def test_a_late_shape_changes_no_number(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """Its first pass has no graph, and computes activations again beside the memory of the others."""
    arguments = {"tp": 1, "kind": kind, "checkpoint": str(checkpoint), "save_dir": str(tmp_path)}
    assert_same(run_world(1, graph_checks.curves, has_late_shape=True, **arguments)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("comm_type", ["p2p", "a2a", "all_gather"])
@pytest.mark.parametrize("kind", ["all trained", "distributed", "lora"])
def test_graphs_of_divided_tokens_change_no_number(tmp_path: Path, kind: str, comm_type: str) -> None:
    """Layers exchange tokens inside their graphs, in every way."""
    make_hf_llava(tmp_path / "hf", text_overrides=WIDE | {"head_dim": 64})
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments = {"tp": 1, "kind": kind, "checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path)}
    assert_same(run_world(2, graph_checks.curves, cp=2, comm_type=comm_type, **arguments)[0])


def assert_same(runs: dict[str, Curve]) -> None:
    """Losses and norms agree within the rounding of sums whose order is not fixed.

    In bf16 it grows from step to step, and more in norms than in losses: at tp 2 x dp 2 norms of Qwen3-VL were 1e-6,
    3e-4, 8e-4 and 2.4e-3 apart in steps two to five, losses at most 1.4e-4.
    """
    off = {"loss": 0.0, "norm": 0.0}
    for one, other in zip(runs["with"], runs["without"], strict=True):
        off = {name: max(off[name], abs(a - b) / b) for name, a, b in zip(off, one, other, strict=True)}
    print("worst relative differences", off, json.dumps(runs))
    assert off["loss"] < 2e-3 and off["norm"] < 5e-3


@pytest.mark.parametrize(
    ("tp", "dp", "name", "kind"),
    [
        (tp, dp, name, kind)
        for tp, dp in LAYOUTS
        for name, kinds in {"qwen2_5_vl": TOWERS, "qwen3_vl": ["all trained"]}.items()
        for kind in kinds
        if tp > 1 or kind != WHOLE
    ],
)
def test_graphs_of_a_tower_change_no_number(tmp_path: Path, tp: int, dp: int, name: str, kind: str) -> None:
    """On images of several sizes: their patches are filled up to the size of a graph, and so are their windows.
    Qwen3-VL's language model adds features between graphs."""
    hf = tmp_path / "hf"
    make_hf_qwen(hf, name)
    import_hf(hf, tmp_path / "megatron")
    arguments = {"tp": tp, "kind": kind, "checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path)}
    assert_same(run_world(tp * dp, graph_checks.tower_curves, hf=str(hf), **arguments)[0])


def test_a_tower_in_fp8(tmp_path: Path) -> None:
    """Near BF16's losses, on images of several sizes, and the first loss after a resume, bit for bit.

    Losses fall to a fourth in five steps, so that later ones show what rounding has grown to.
    """
    hf = tmp_path / "hf"
    text = {"hidden_size": 128, "intermediate_size": 256, "rope_parameters": ROPE | {"mrope_section": [2, 2, 4]}}
    vision = {"hidden_size": 128, "intermediate_size": 200, "out_hidden_size": 128}
    make_hf_qwen(hf, "qwen2_5_vl", text_overrides=text, vision_overrides=vision)
    import_hf(hf, tmp_path / "megatron")
    arguments = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path), "hf": str(hf)}
    found = run_world(1, graph_checks.fp8_curves, **arguments)[0]
    print(json.dumps(found))
    for recipe in RECIPES:
        assert found[recipe][0] == pytest.approx(found["bf16"][0], rel=0.02), recipe
        losses, expected = ([loss for loss, _ in found[name]] for name in (recipe, "bf16"))
        assert losses == pytest.approx(expected, rel=0.1), recipe
        assert found[recipe][0][0] != found[f"{recipe}, decoder"][0][0], "the tower multiplies in FP8"
    for recipe in ("bf16", *RECIPES):
        assert found[f"{recipe}, resumed"][0][0] == found[f"{recipe}, on"][0][0], recipe


@pytest.mark.parametrize(
    "kind", ["all trained", "distributed", "lora", "nf4", "delayed", "tensorwise", "blockwise", "lora in FP8"]
)
def test_a_run_with_graphs_resumes_bit_for_bit(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    if kind == "nf4":
        needs("bitsandbytes")
    hf = str(hf_folder(iteration_folder(checkpoint, 0)))
    arguments = {"kind": kind, "checkpoint": str(checkpoint), "save_dir": str(tmp_path), "hf": hf}
    expected, resumed = run_world(1, graph_checks.resumed, **arguments)[0]
    print(kind, json.dumps([expected, resumed]))
    assert resumed == expected
