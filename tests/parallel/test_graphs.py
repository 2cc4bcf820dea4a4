"""Runs with graphs over data-parallel ranks, on CPUs with emulated graphs. CUDA graphs: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import graph_checks
from tests.parallel.graph_checks import KINDS, STEPS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("graphs")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_graphs_that_one_rank_has_first_change_no_gradient(checkpoint: Path, tmp_path: Path, tp: int, dp: int) -> None:
    """A graph returns the gradients of its layers at once, in another order than the layers themselves. With a bucket
    for each matrix, ranks would add up gradients of different matrices if each reduced them as they come."""
    arguments = {"tp": tp, "checkpoint": str(checkpoint), "save_dir": str(tmp_path)}
    ranks: list[dict[str, dict[str, Any]]] = run_world(tp * dp, graph_checks.curves, **arguments)
    assert_same(ranks, KINDS)


def test_attention_and_routers_of_layers_with_experts(tmp_path: Path) -> None:
    """Their gradients are reduced over other ranks than those of experts, which have no graph."""
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    arguments = {"checkpoint": str(tmp_path / "megatron"), "save_dir": str(tmp_path), "kinds": ["distributed"]}
    ranks = run_world(2, graph_checks.curves, tp=1, ep=2, **arguments)
    assert_same(ranks, ["distributed"])


def test_layers_whose_tokens_ranks_divide(checkpoint: Path, tmp_path: Path) -> None:
    """Two replicas of two ranks: the layers exchange tokens inside their graphs, forward and backward."""
    kinds = ["distributed", "adapters"]
    arguments = {"checkpoint": str(checkpoint), "save_dir": str(tmp_path), "kinds": kinds}
    assert_same(run_world(4, graph_checks.curves, tp=1, cp=2, **arguments), kinds)


def assert_same(ranks: list[dict[str, dict[str, Any]]], kinds: Iterable[str]) -> None:
    """Losses, norms and the order of reductions do not show which rank had graphs."""
    for kind in kinds:
        for rank, results in enumerate(ranks):
            result = results[kind]
            assert result["with"] == [pytest.approx(step, rel=1e-6) for step in result["without"]], (kind, rank)
            assert result["replicas agree"], (kind, rank)
            assert result["calls with"] > 0 and result["calls without"] == 0
            assert result["reduced with"] == result["reduced without"] == ranks[0][kind]["reduced with"], (kind, rank)
            assert len(result["reduced with"]) > STEPS, "the model has several buckets"
