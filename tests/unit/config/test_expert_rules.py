"""Each rule about mixtures of experts has a case that breaks it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run
from tests.helpers.run_settings import DIMS, smallest_run

WITH_EXPERTS = replace(DIMS, num_experts=8, expert_ffn_hidden_size=48)
EP, ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides of a run without problems, for 8 processes: tp 2 x pp 2 x dp 2, ep 4."""
    return [
        *smallest_run(tmp_path),
        f"{TP}=2",
        f"{PP}=2",
        f"{EP}=4",
        "parallel.sequence_parallel=true",
        "parallel.use_distributed_optimizer=true",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [f"{EP}=1", f"{ETP}=2", "parallel.use_distributed_optimizer=false"],
        [f"{EP}=2", f"{ETP}=2"],
        ["adapter.r=8", "adapter.expert_r=4"],
        ["adapter.expert_r=4", f"{EP}=2", f"{ETP}=2"],
        ["training.precision=fp16", "training.loss_scale=128"],
        ["validation.eval_generate=5"],
        [f"{TP}=1", "parallel.sequence_parallel=false", "model.recompute=selective"],
    ],
    ids=str,
)
def test_layouts_that_fit(good: list[str], changes: list[str]) -> None:
    run = load_run_config(None, [*good, *changes])
    assert check_run(run, WITH_EXPERTS, world_size=8, device_available=False) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([f"{EP}=3", f"{PP}=1", f"{TP}=1", "parallel.sequence_parallel=false"], "--ep 3 does not divide the number of"),
        ([f"{EP}=8"], "--ep 8 x --etp 1 = 8 does not divide the 4 processes of a stage"),
        ([f"{EP}=1", f"{ETP}=4"], "--etp 4 does not divide --tp 2"),
        (["parallel.sequence_parallel=false"], "train at --tp 2 or more with --sequence-parallel only"),
        (["parallel.use_distributed_optimizer=false"], "needs the distributed optimizer: add --dist-optim"),
        (["training.precision=fp16"], "does not work with fp16's dynamic loss scale"),
        (["adapter.expert_r=8", "adapter.dora=true"], "--lora-dora does not work with adapter.expert_r"),
        (["adapter.expert_r=8", "adapter.dropout=0.1"], "--lora-dropout does not work with adapter.expert_r"),
        (["adapter.r=8", "adapter.quantize=nf4", f"{EP}=2", f"{ETP}=2"], "--lora-quantize quantizes whole experts"),
        ([f"{ETP}=5"], "--etp 5 does not divide the width of an expert, which is 48"),
    ],
    ids=str,
)
def test_layouts_that_do_not_fit(good: list[str], changes: list[str], expected: str) -> None:
    run = load_run_config(None, [*good, *changes])
    world_size = 6 if f"{EP}=3" in changes else 8
    found = check_run(run, WITH_EXPERTS, world_size=world_size, device_available=False)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("width", "changes", "expected"),
    [
        (48, [], ""),
        (48, [f"{EP}=1", f"{ETP}=2"], "which is 48 in the model, is not a multiple of 32"),
        (40, [], "--fp8: the width of an expert, which is 40 in the model, is not a multiple of 16, as FP8 products"),
        (48, ["training.precision=fp16", "training.loss_scale=128"], "omit --precision fp16"),
    ],
    ids=str,
)
def test_fp8(good: list[str], width: int, changes: list[str], expected: str) -> None:
    """Also with CUDA graphs."""
    options = ["training.fp8=true", "training.precision=bf16", "model.cuda_graphs=true", "data.packing=true"]
    run = load_run_config(None, [*good, f"{PP}=1", f"{EP}=1", *options, *changes])
    dims = replace(WITH_EXPERTS, expert_ffn_hidden_size=width)
    found = check_run(run, dims, world_size=2, device_available=True)
    assert found == [] if not expected else any(expected in problem for problem in found), found


def test_flags_for_a_model_without_experts(good: list[str]) -> None:
    run = load_run_config(None, [*good, "router.aux_loss_coef=0.1", "adapter.expert_r=4"])
    assert check_run(run, DIMS, world_size=8, device_available=False) == [
        "--ep 4: the model has no mixtures of experts to divide: omit it",
        "router.aux_loss_coef: the model has no mixtures of experts, so no router: omit it",
        "adapter.expert_r: the model has no mixtures of experts: omit it",
    ]
