"""What a checkpoint contains, if training continues while it is written."""

from __future__ import annotations

from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from llava_mcore.checkpoint.dist import StateWrite, load_state
from llava_mcore.checkpoint.node_local import _on_host
from llava_mcore.checkpoint.sharded import convert_data, num_bytes
from llava_mcore.config.load import load_run_config
from llava_mcore.data.loader.turns import states_to_read, streams_of_rank
from llava_mcore.parallel.groups import single_process
from llava_mcore.training.saving.pending import steps_before_allocation
from llava_mcore.training.saving.state import LOADER_FOLDER, SavedLoaderStates, loader_file


def sharded(name: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("flags", "steps"), [([], 1), (["model.cuda_graphs=true"], 4), (["optimizer.cpu_offload=true"], None)]
)
def test_memory_is_allocated_before_the_first_save(flags: list[str], steps: int | None) -> None:
    assert steps_before_allocation(load_run_config(None, flags)) == steps


def test_only_what_training_changes_is_live() -> None:
    """The copies of a conversion are nobody else's: copying them again would take as much host memory again."""
    weights, moments = sharded("weights"), sharded("moments")
    moments.data = torch.zeros(3, 4).bfloat16()
    live = convert_data([weights, moments])
    converted, kept = ((x.data.untyped_storage().data_ptr(), x.data) for x in (moments, weights))
    assert converted[0] not in live and kept[0] in live
    assert _on_host(converted[1], live).data_ptr() == converted[1].data_ptr()
    assert _on_host(kept[1], live).data_ptr() != kept[1].data_ptr() == _on_host(kept[1], ()).data_ptr()


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


@pytest.mark.parametrize(
    ("before", "now", "files"), [(8, 8, 1), (8, 16, 1), (8, 4, 2), (12, 8, 3), (6, 5, 6), (5, 6, 5), (1, 24, 1)]
)
def test_a_rank_reads_the_positions_of_its_streams_only(tmp_path: Path, before: int, now: int, files: int) -> None:
    """All positions on every rank would be a million files with 1,024 of them."""
    num_streams = 48
    (tmp_path / LOADER_FOLDER).mkdir()
    for rank in range(before):
        streams = dict.fromkeys(streams_of_rank(num_streams, rank, before))
        torch.save({"streams": streams}, tmp_path / LOADER_FOLDER / loader_file(rank))
    saved = SavedLoaderStates(tmp_path)
    for rank in range(now):
        states = [saved[index] for index in states_to_read(len(saved), num_streams, rank, now)]
        assert len(states) == files
        assert {n for state in states for n in state["streams"]} >= set(streams_of_rank(num_streams, rank, now))
