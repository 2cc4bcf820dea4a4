"""What fully sharded data parallelism cannot do together with is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run
from tests.helpers.run_settings import DIMS, smallest_run
from tests.unit.config.test_expert_rules import WITH_EXPERTS


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides of a run without problems, for 8 processes."""
    return [
        *smallest_run(tmp_path),
        "parallel.fsdp=optim_grads_params",
        "parallel.tensor_model_parallel_size=2",
        "validation.eval_interval=5",
    ]


def test_it_includes_the_distributed_optimizer(good: list[str]) -> None:
    run = load_run_config(None, good)
    assert run.parallel.divides_optimizer and run.parallel.divides_weights
    assert check_run(run, DIMS, world_size=8, device_available=True) == []
    assert not load_run_config(None, good[:3]).parallel.divides_optimizer
    for replicas in (1, 2):
        hybrid = load_run_config(None, [*good, f"parallel.hsdp_replicas={replicas}"])
        assert check_run(hybrid, DIMS, world_size=8, device_available=True) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["parallel.pipeline_model_parallel_size=2"], "works with --pp 1 only"),
        (["parallel.hsdp_replicas=3"], "--hsdp 3 does not divide the 4 data-parallel ranks .* use --hsdp 2"),
        (["parallel.hsdp_replicas=4"], "--hsdp 4 does not divide .* into groups of several: use --hsdp 2"),
        (["training.precision=fp16"], "loss scale of --precision fp16: use bf16"),
        (["training.fp8=true"], "does not work with --fp8 yet"),
        (["optimizer.use_precision_aware_optimizer=true"], "optimizer.use_precision_aware_optimizer: omit one of them"),
        (["model.cuda_graphs=true", "data.packing=true"], "does not work with --cuda-graphs"),
        (["adapter.r=4", "adapter.quantize=nf4"], "does not divide quantized weights"),
        (["validation.eval_generate=5"], "--eval-generate writes answers .* use --fsdp optim_grads"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_it_cannot_do(good: list[str], changes: list[str], expected: str) -> None:
    found = check_run(load_run_config(None, [*good, *changes]), DIMS, world_size=8, device_available=True)
    assert len(found) == 1, found
    with pytest.raises(ValueError, match=expected):
        raise ValueError(found[0])


def test_the_optimizer_stays_on_the_gpus(good: list[str]) -> None:
    keys = ["optimizer.cpu_offload=true", "optimizer.use_precision_aware_optimizer=true"]
    found = check_run(load_run_config(None, [*good, *keys]), DIMS, world_size=8, device_available=True)
    assert len(found) == 2 and "an optimizer on the host" in found[1]


def test_checkpoints_are_not_node_local(good: list[str]) -> None:
    keys = [
        "checkpoint.non_persistent_local_dir=/d",
        "checkpoint.non_persistent_save_interval=2",
        "checkpoint.save=true",
    ]
    run = load_run_config(None, [*good, *keys, "checkpoint.save_optim=true"])
    (found,) = check_run(run, DIMS, world_size=8, device_available=True)
    assert "does not save to node-local disks" in found


def test_answers_need_whole_weights_only(good: list[str]) -> None:
    run = load_run_config(None, [*good, "parallel.fsdp=optim_grads", "validation.eval_generate=5"])
    assert check_run(run, DIMS, world_size=8, device_available=True) == []


def test_experts(good: list[str]) -> None:
    keys = [*good, "parallel.sequence_parallel=true", "parallel.expert_model_parallel_size=4"]
    assert check_run(load_run_config(None, keys), WITH_EXPERTS, world_size=8, device_available=True) == []
    for more, expected in (("parallel.hsdp_replicas=2", "experts into groups"), ("adapter.expert_r=4", "on experts")):
        (found,) = check_run(load_run_config(None, [*keys, more]), WITH_EXPERTS, world_size=8, device_available=True)
        assert expected in found


def test_groups_of_divided_samples(good: list[str]) -> None:
    keys = [*good, "parallel.context_parallel_size=2", "data.packing=true"]
    run = load_run_config(None, [*keys, "parallel.hsdp_replicas=2"])
    assert check_run(run, DIMS, world_size=8, device_available=True) == []
    (found,) = check_run(
        load_run_config(None, [*keys, "parallel.hsdp_replicas=8"]), DIMS, world_size=8, device_available=True
    )
    assert "does not divide the 4 data-parallel x context ranks" in found
