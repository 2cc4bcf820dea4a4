"""What costs time in large worlds: calls in which all hosts take part, and bytes that several ranks read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import collective_checks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("collectives")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


@pytest.mark.parametrize("tp", [1, 2])
def test_all_hosts_meet_once_per_step(checkpoint: Path, tmp_path: Path, tp: int) -> None:
    found = run_world(2, collective_checks.per_step, checkpoint=str(checkpoint), save_dir=str(tmp_path), tp=tp)
    # The second call goes to the hosts of the replica, which at tp 2 are all: the shapes of the batch.
    assert found == [[{"isend": 1} if tp == 1 else {"isend": 1, "broadcast": 1}] * 5] * 2


def test_hosts_of_many_replicas_need_two_groups_and_few_messages() -> None:
    """The device's groups are torch's fake ones: on GPUs, too, only the two of the hosts are gloo's."""
    size = 5
    for rank, found in enumerate(run_world(size, collective_checks.host_side)):
        assert found["sums"] == [10, size, size * 2**40]
        assert found["messages"] == [3, 2, 2, 2, 1][rank]
        assert (found["gloo groups"], found["control of the replica"]) == (2, False)
        assert found["files"] > 256
        assert found["problems"] == ["rank 1: no disk", "rank 4: no disk"]


def test_saves_are_planned_once_and_tensors_read_once(checkpoint: Path, tmp_path: Path) -> None:
    for found in run_world(2, collective_checks.saves, checkpoint=str(checkpoint), save_dir=str(tmp_path)):
        first, *later = found["calls"]
        assert first["all_gather_object"] > 1
        for calls in later:
            # Of files that have been written: their contents' places and their checksums, new in each save.
            assert (calls["gather_object"], calls["all_gather_object"]) == (2, 0)
            assert calls["broadcast_object_list"] == calls["scatter_object_list"] == 0
        assert not found["prepared after a save"]
        assert found["equal"], "a reused plan writes the same files"
        assert found["resumed"]
        assert found["read"] and set(found["read"].values()) == {1}
        assert min(found["shares"]) > 0.2 * sum(found["shares"])
        assert found["new"] == [(True, False), (False, False), (True, True), (False, False), (True, True)]
        _check_divided(found["divided"])


def _check_divided(found: dict[str, Any]) -> None:
    division, save = found["calls"]
    assert division["all_gather_object"] == 2, "who holds what, and that every tensor is written once"
    assert save["all_gather_object"] < 4, "the first save does not repeat it"
    expected, written = found["bytes"]
    assert expected == written > 0
    assert found["files"] > 4 and found["threads"] > 1
    assert found["resumed"] and set(found["read"].values()) == {1}
