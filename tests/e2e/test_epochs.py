"""A run by epochs of packs: where it ends, and that it counts on at another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import read_metrics
from tests.helpers.forked_training import train_forked
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

SAMPLES = 60


@pytest.mark.long
def test_packs_of_two_epochs_are_the_same_after_a_resume_at_other_ranks(tmp_path: Path) -> None:
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    make_dataset(tmp_path / "data", num_samples=SAMPLES)

    def train(name: str, ranks: int, epochs: int) -> str:
        places: list[Any] = ["--megatron-load-dir", tmp_path / "megatron", "--tokenizer-load-dir", tmp_path / "hf"]
        places += ["--data-path", tmp_path / "data", "--save-dir", tmp_path / "save", "--name", name, "-g", ranks]
        sizes = ["--micro-batch-size", 1, "--global-batch-size", 4, "--seq-length", 128, "--packing", "--lr", 1e-3]
        rate = ["optimizer.lr_decay_style=constant", "optimizer.lr_warmup_fraction=0", "data.num_workers=0"]
        saving = ["--save", "--save-optim", "--load-optim"]
        return train_forked(*places, *sizes, *rate, *saving, "--train-epochs", epochs)

    text = train("whole", 1, 2)
    assert f"2 epochs of {SAMPLES} samples = {2 * SAMPLES} samples: at most {2 * SAMPLES // 4} iterations" in text
    assert "| epoch " in text
    whole = read_metrics(tmp_path / "save" / "whole")
    read = [m["num_conversations"] + m["num_skipped"] for m in whole]
    assert sum(read) >= 2 * SAMPLES > sum(read[:-1]) and len(whole) < 2 * SAMPLES // 4

    train("parts", 2, 1)
    text = train("parts", 2, 1)
    assert f"the run is complete: {tmp_path / 'save' / 'parts'}" in text and f"has read all {SAMPLES} samples" in text
    train("parts", 1, 2)
    parts = read_metrics(tmp_path / "save" / "parts")
    assert [m["loss"] for m in parts] == pytest.approx([m["loss"] for m in whole], abs=1e-5)
