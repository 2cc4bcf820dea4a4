"""What a checkpoint contains, if training continues while it is written."""

from __future__ import annotations

from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llava_mcore.checkpoint.dist import StateWrite, load_state
from llava_mcore.checkpoint.sharded import num_bytes
from llava_mcore.config.load import load_run_config
from llava_mcore.parallel.groups import single_process
from llava_mcore.training.saving.host_memory import steps_before_allocation


def sharded(name: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("flags", "steps"), [([], 1), (["model.cuda_graphs=true"], 4), (["optimizer.cpu_offload=true"], None)]
)
def test_memory_is_allocated_before_the_first_save(flags: list[str], steps: int | None) -> None:
    assert steps_before_allocation(load_run_config(None, flags)) == steps


def test_moments_in_bf16_are_saved_in_fp32_as_they_were(tmp_path: Path) -> None:
    weights, moments = torch.randn(3, 4), torch.randn(3, 4).bfloat16()
    expected = {"weights": weights.clone(), "moments": moments.float()}
    with single_process():
        state = {"weights": sharded("weights"), "moments": sharded("moments")}
        state["weights"].data, state["moments"].data = weights, moments
        assert num_bytes(state["moments"]) == 48
        write = StateWrite(state, tmp_path, copy=True)
        weights.fill_(7.0)
        moments.fill_(7.0)
        write.write()
        write.finish()
        loaded = load_state({name: sharded(name) for name in expected}, tmp_path)
    for name, value in expected.items():
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], value)
