"""Steps that are not finite, early stops and background saves, with several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import fault_checks, start_checks
from tests.parallel.fault_checks import NOT_FINITE_AT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_step_that_is_not_finite(checkpoint: Path, tmp_path: Path) -> None:
    """All ranks end with the iteration and the samples of the micro-batch, before anything of it is saved."""
    found = run_world(2, fault_checks.faults, checkpoint=str(checkpoint), save_dir=str(tmp_path / "save"))
    assert found[0]["error"] == found[1]["error"] and found[0]["on_all_ranks"]
    message = found[0]["error"]
    assert f"iteration {NOT_FINITE_AT}: loss nan" in message and "--on-nan skip" in message
    # 2 micro-batches a rank of 2 samples each, dealt in turns: the second one of rank 1 in the third step
    assert "(1 problem)" in message and "micro-batch 1 of data-parallel rank 1: 6, 7" in message
    stored = torch.load(tmp_path / "save/stop/faults/iter_0000003/dp_00001.pt", weights_only=True)
    assert stored["iteration"] == NOT_FINITE_AT and len(stored["micro_batches"]) == 2
    assert stored["micro_batches"][1]["pixel_values"].isnan().sum() == 1
    assert len(lines(found[0]["metrics"]["stop"])) == NOT_FINITE_AT - 1
    assert "the weights were changed by it, but not saved" in message
    assert found[0]["last before it"] == NOT_FINITE_AT - 1

    skip, left_out = lines(found[0]["metrics"]["skip"]), lines(found[0]["metrics"]["range"])
    assert [m["loss"] is None for m in skip] == [m["loss"] is None for m in left_out] == [i == 3 for i in range(1, 7)]
    assert [m["updated"] for m in skip] == [i != 3 for i in range(1, 7)]
    for i in (0, 1, 3, 4, 5):
        assert skip[i]["loss"] == left_out[i]["loss"], "the step left the weights as they were"
    assert found[0]["equal"] and found[1]["equal"]
    assert (skip[-1]["failed_updates"], skip[-1]["skipped_iterations"]) == (1, 0)
    assert (left_out[-1]["failed_updates"], left_out[-1]["skipped_iterations"]) == (0, 1)
    assert skip[-1]["consumed_samples"] == left_out[-1]["consumed_samples"] == 48

    assert found[0]["stopped at"] == 4, "asked on rank 1 only"
    assert [x["micro-batches before it"] for x in found] == [8, 8], "the batch that was read but not trained on"
    assert "10 updates in a row were skipped" in found[0]["diverging"]
    assert found[0]["full"] == found[1]["full"], "only rank 0 writes"
    message, on_all_ranks = found[0]["full"]
    assert message.startswith("rank 0: ") and "full/metrics.jsonl: No space left on device; free some" in message
    assert on_all_ranks
    assert found[0]["stacks"] == []


def test_a_start_that_fails_on_one_rank(checkpoint: Path, tmp_path: Path) -> None:
    """All ranks end with the message of that one."""
    make_hf_llava(tmp_path / "hf", tie=False)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors[max(name for name in tensors if "down_proj" in name)].view(-1)[3] = torch.nan  # of the last stage
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    import_hf(tmp_path / "hf", tmp_path / "nan")
    first, second = run_world(
        2,
        start_checks.start_faults,
        checkpoint=str(checkpoint),
        with_nan=str(tmp_path / "nan"),
        save_dir=str(tmp_path / "save"),
    )
    text, on_all_ranks, seconds = second.pop("inside a collective call")
    assert text.startswith("rank 1 alone\n(waiting for the other ranks)\nrank 1: rank 1 alone") and not on_all_ranks
    assert seconds < 30
    assert first.pop("inside a collective call")[0] == ""
    for phase, (text, on_all_ranks, seconds) in first.items():
        assert second[phase][:2] == (text, on_all_ranks) and on_all_ranks, phase
        assert ("holds NaN" if phase == "NaN" else f"the {phase} of this rank cannot be used") in text
        assert seconds < 60, "not the timeout"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_background_save_holds_what_was_there_when_it_began(checkpoint: Path, tmp_path: Path, tp: int) -> None:
    arguments: dict[str, Any] = {"checkpoint": str(checkpoint), "save_dir": str(tmp_path), "tp": tp}
    for result in run_world(2, fault_checks.background_save, **arguments):
        assert result["during"] == (True, 2) and result["after"] == (False, 7)
        assert result["equal"] and result["moments"] and result["progress"] == 7
        if result["loader"] is not None:
            assert result["loader"] == [{"place": 1}] * (2 // tp)
        assert [number > 1 for number, _ in result["failed"]] == [False, False, True, True, True, True]
        for _, message in result["failed"]:
            assert "could not be written" in message and "is the disk full" in message
        assert result["latest"] == 9
        assert result["replaced"] == (True, True)
        assert result["refused"] == [
            "save/.iter.partial: no room",
            "save/.iter.partial: CheckpointError: no config.json",
            "save/.iter.partial: RuntimeError: unexpected pos 64 vs 8",
            "a name that the program gets wrong",
        ]
        drifted, masks, draws = result["alike"]
        assert masks == [0.25, 0.25]
        assert (draws[0] == draws[1]) == (tp == 2), "replicas draw different dropout masks, ranks of one the same"
        assert not drifted if tp == 1 else "should have alike differ" in drifted and "(1 problem):" in drifted
    assert not (tmp_path / "async" / "iter_0000010").exists()
    assert not list((tmp_path / "async").glob(".*.partial")), "it would fill the disk"
