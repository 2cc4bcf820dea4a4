"""Runs by the command that a user types."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import read_metrics, run
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tp", (1, 2)[: torch.cuda.device_count()])
def test_a_run_with_graphs_ends_and_repeats_one_without(tmp_path: Path, tp: int) -> None:
    """At tp 2 graphs hold messages, and NCCL ends no communicator while they exist."""
    make_hf_llava(tmp_path / "hf", text_overrides={"hidden_size": 128, "intermediate_size": 256})
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    make_dataset(tmp_path / "data")
    places = ("--megatron-load-dir", tmp_path / "megatron", "--data-path", tmp_path / "data")
    sizes = ("--train-iters", 5, "--micro-batch-size", 1, "--global-batch-size", 4, "--seq-length", 128)
    save = ("--save-dir", tmp_path / "save", *(["--sequence-parallel"] if tp > 1 else []))
    common = (*places, *sizes, *save, "--packing", "--lr", 1e-3)
    losses = []
    for name, flags in {"without": [], "with": ["--cuda-graphs"]}.items():
        run("train/run.py", "--name", name, "-g", tp, "--tp", tp, *common, *flags, timeout=120)
        losses.append([m["loss"] for m in read_metrics(tmp_path / "save" / name)])
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
