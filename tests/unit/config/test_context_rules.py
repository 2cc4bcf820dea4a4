"""Each rule about context parallelism has a case that breaks it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run, data_to_read, pad_multiple
from tests.helpers.run_settings import DIMS, smallest_run

CP, COMM_TYPE = "parallel.context_parallel_size", "parallel.cp_comm_type"
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
LAYERS = "model.transformer_impl=local"
PACKED = ["data.packing=true", "data.seq_length=2048"]


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides of a run without problems, for 4 processes: cp 2 x dp 2."""
    return smallest_run(tmp_path, f"{CP}=2", *PACKED)


@pytest.mark.parametrize(
    ("changes", "on_gpus"),
    [
        ([], True),
        ([], False),
        ([f"{CP}=4"], True),
        ([f"{TP}=2", "parallel.sequence_parallel=true"], True),
        ([f"{PP}=2", "parallel.vision_data_parallel=false"], True),
        ([f"{COMM_TYPE}=a2a"], True),
        ([f"{COMM_TYPE}=all_gather"], True),
        ([f"{CP}=4", f"{COMM_TYPE}=a2a+p2p", "parallel.cp_a2a_size=2"], True),
        (["training.precision=fp32", LAYERS], True),
        (["data.sample_multiple=16"], True),
        (["adapter.r=8", "model.recompute=full"], True),
        (["validation.eval_generate=5"], True),
        (["model.cuda_graphs=true"], True),
    ],
    ids=str,
)
def test_layouts_that_fit(good: list[str], changes: list[str], on_gpus: bool) -> None:
    run = load_run_config(None, [*good, *changes])
    assert check_run(run, DIMS, world_size=4, device_available=on_gpus) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            [f"{CP}=3", "data.seq_length=2040"],
            "4 processes (--gpus) cannot be divided into groups of --tp 1 x --cp 3 x --pp 1 = 3",
        ),
        (["data.seq_length=2050"], "--seq-length 2050 must be a multiple of 16 with --cp 2: change it"),
        (["data.sample_multiple=6"], "data.sample_multiple 6 is not a multiple of 4 = 2 x --cp 2"),
        (["data.sample_multiple=48"], "--seq-length 2048 is not a multiple of data.sample_multiple 48"),
        ([f"{COMM_TYPE}=a2a+p2p", "parallel.cp_a2a_size=2"], "--cp 2 cannot be divided into groups of neighbors"),
        (
            [f"{CP}=4", f"{COMM_TYPE}=a2a+p2p"],
            "--cp-comm-type a2a+p2p needs --cp-a2a-size: of --cp 4 processes, 2 neighbors can exchange heads",
        ),
        (
            [f"{CP}=4", f"{COMM_TYPE}=a2a+p2p", "parallel.cp_a2a_size=3"],
            "--cp-comm-type a2a+p2p does not work with --cp-a2a-size 3: of --cp 4 processes, 2",
        ),
        ([LAYERS, f"{COMM_TYPE}=p2p"], "--cp-comm-type chooses how Transformer Engine's attention exchanges tokens"),
        (["training.precision=fp32"], "with divided tokens, Transformer Engine's attention needs half precision"),
        (
            ["data.packing=false", "model.attention_backend=flash"],
            "--cp 2: --flash-attn divides the tokens of packed samples only: add --packing",
        ),
    ],
    ids=str,
)
def test_each_rule(good: list[str], changes: list[str], expected: str) -> None:
    run = load_run_config(None, [*good, *changes])
    (message,) = check_run(run, DIMS, world_size=4, device_available=True)
    assert message.startswith(expected) or expected in message


@pytest.mark.parametrize(
    ("dims", "changes", "expected"),
    [
        ({"num_query_groups": 1}, [f"{COMM_TYPE}=a2a"], "does not divide the 1 key/value heads of M: lower --cp"),
        (
            {"num_query_groups": 1},
            [f"{CP}=4", f"{COMM_TYPE}=a2a+p2p", "parallel.cp_a2a_size=2"],
            "--tp 1 x --cp-a2a-size 2 = 2 does not divide the 1 key/value heads of M: lower --cp-a2a-size, or use",
        ),
        (
            {"delta_key_heads": 2, "delta_value_heads": 8, "delta_width": 64},
            [f"{CP}=4"],
            "--tp 1 x --cp 4 = 4 does not divide the 2 key heads of the delta nets of M",
        ),
        (
            {"num_experts": 8},
            ["parallel.expert_model_parallel_size=8", "parallel.use_distributed_optimizer=true"],
            "--ep 8 x --etp 1 = 8 does not divide the 4 processes of a stage, which are --tp 1 x --cp 2 x 2 data-",
        ),
    ],
    ids=str,
)
def test_each_rule_of_a_model(good: list[str], dims: dict[str, int], changes: list[str], expected: str) -> None:
    run = load_run_config(None, [*good, *changes])
    (message,) = check_run(run, replace(DIMS, **dims), world_size=4, device_available=True, source="M")
    assert expected in message


def test_what_lengths_are_rounded_up_to(good: list[str]) -> None:
    run = load_run_config(None, [*good, f"{TP}=2", "parallel.sequence_parallel=true"])
    assert pad_multiple(run) == 8 * 2 * 2 and data_to_read(run).sample_multiple == 4
    assert data_to_read(load_run_config(None, [*good, "data.packing=false"])).sample_multiple is None
    assert data_to_read(load_run_config(None, [*good, f"{CP}=1"])).sample_multiple is None
    assert data_to_read(load_run_config(None, [*good, "data.sample_multiple=8"])).sample_multiple == 8
