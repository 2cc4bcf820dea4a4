"""Each rule about options that save memory or time has a case that breaks it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run, pad_multiple
from tests.helpers.run_settings import DIMS, smallest_run

FIRST, LAST = "parallel.num_layers_in_first_pipeline_stage", "parallel.num_layers_in_last_pipeline_stage"
PRECISION_AWARE = "optimizer.use_precision_aware_optimizer"
AWARE = [f"{PRECISION_AWARE}=true", "training.precision=bf16"]
VIRTUAL = "parallel.num_layers_per_virtual_pipeline_stage"


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides of a run of 8 layers without problems, for 8 processes: tp 2 x pp 2 x dp 2, 64 micro-batches."""
    return [
        *smallest_run(tmp_path),
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=2",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        [f"{FIRST}=3"],
        [f"{LAST}=2"],
        [f"{FIRST}=3", f"{LAST}=5"],
        [f"{FIRST}=2", "parallel.pipeline_model_parallel_size=4", "parallel.tensor_model_parallel_size=1"],
        [f"{VIRTUAL}=1"],
        [f"{VIRTUAL}=2", "parallel.sequence_parallel=true"],
        ["model.recompute=full", "model.freeze_vision_model=false", "model.recompute_vision=full"],
        ["model.recompute=selective", "model.recompute_modules=core_attn,mlp"],
    ],
    ids=str,
)
def test_options_that_fit(good: list[str], changes: list[str]) -> None:
    assert check_run(load_run_config(None, [*good, *changes]), DIMS, world_size=8, device_available=False) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            ["parallel.sequence_parallel=true", "parallel.tensor_model_parallel_size=1"],
            ["no effect without --tp 2 or more"],
        ),
        (
            ["parallel.sequence_parallel=true", "data.seq_length=1000"],
            ["--seq-length 1000 must be a multiple of 16 with --sequence-parallel"],
        ),
        (["model.recompute_vision=full"], ["model.recompute_vision has no effect on a frozen vision tower"]),
        ([f"{FIRST}=3", "parallel.pipeline_model_parallel_size=1"], [FIRST, "no effect without --pp 2 or more"]),
        ([f"{VIRTUAL}=1", "parallel.pipeline_model_parallel_size=1"], [VIRTUAL, "no effect without --pp 2 or more"]),
        ([f"{FIRST}=8"], ["leave 0 of the 8 layers", "1 other stages (--pp 2)"]),
        ([f"{FIRST}=3", f"{LAST}=4"], ["leave 1 of the 8 layers", "0 other stages"]),
        (
            [f"{FIRST}=3", "parallel.pipeline_model_parallel_size=4", "parallel.tensor_model_parallel_size=1"],
            ["leave 5 of the 8 layers", "3 other stages"],
        ),
        ([f"{VIRTUAL}=4"], [f"{VIRTUAL} 4 does not divide the 4 layers", "use 1 or 2"]),
        ([f"{VIRTUAL}=3"], [f"{VIRTUAL} 3 does not divide the 4 layers", "use 1 or 2"]),
        ([f"{VIRTUAL}=2", f"{FIRST}=3"], ["needs stages of equal size"]),
        (["optimizer.exp_avg_dtype=bf16"], ["optimizer.exp_avg_dtype has no effect without", PRECISION_AWARE]),
        (["optimizer.cpu_offload=true"], ["optimizer.cpu_offload has no effect without", PRECISION_AWARE]),
        ([*AWARE, "parallel.use_distributed_optimizer=true"], ["no GPU was found"]),
        ([f"{VIRTUAL}=2", "training.global_batch_size=6"], ["multiple of --pp 2, not 3"]),
    ],
    ids=lambda value: value[0] if value and "=" in value[0] else "",
)
def test_one_broken_rule_gives_one_message(good: list[str], changes: list[str], expected: list[str]) -> None:
    found = check_run(load_run_config(None, [*good, *changes]), DIMS, world_size=8, device_available=False)
    assert len(found) == 1, found
    assert all(words in found[0] for words in expected), found[0]


def test_the_precision_aware_optimizer(good: list[str]) -> None:
    """It is refused without the distributed optimizer and in fp32."""
    there = ["parallel.use_distributed_optimizer=true", "optimizer.exp_avg_dtype=bf16", "optimizer.cpu_offload=true"]
    assert check_run(load_run_config(None, [*good, *AWARE, *there]), DIMS, world_size=8, device_available=True) == []
    found = check_run(load_run_config(None, [*good, *AWARE]), DIMS, world_size=8, device_available=True)
    assert len(found) == 1 and "add --dist-optim" in found[0]
    fp32 = [*good, *AWARE, *there, "training.precision=fp32"]
    found = check_run(load_run_config(None, fp32), DIMS, world_size=8, device_available=True)
    assert len(found) == 1 and "--precision fp32" in found[0]


def test_padding_suits_every_rank(good: list[str]) -> None:
    assert pad_multiple(load_run_config(None, good)) == 8
    assert pad_multiple(load_run_config(None, [*good, "parallel.sequence_parallel=true"])) == 16
    fp8 = ["training.fp8=true", "training.fp8_recipe=blockwise", "parallel.sequence_parallel=true"]
    assert pad_multiple(load_run_config(None, [*good, *fp8])) == 256
