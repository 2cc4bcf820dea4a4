"""Output of a run beside its metrics, by its console: --debug, TensorBoard, the plot."""

from __future__ import annotations

import re
from pathlib import Path

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import read_metrics
from tests.helpers.forked_training import train_forked
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

PHASES = [
    *("imports", "connecting", "choosing a checkpoint", "building the model", "loading the weights"),
    *("building the optimizer", "loading the tokenizer", "loading the state", "opening the data", "first iteration"),
]


def test_debug_shows_the_first_batch_and_the_shapes_of_every_stage(tmp_path: Path) -> None:
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    make_dataset(tmp_path / "data")
    places = ("--megatron-load-dir", tmp_path / "megatron", "--tokenizer-load-dir", tmp_path / "hf")
    more = ("--data-path", tmp_path / "data", "--save-dir", tmp_path / "save", "--name", "debug", "--tensorboard")
    sizes = ("--train-iters", 2, "--micro-batch-size", 2, "--global-batch-size", 4, "--seq-length", 64)
    text = train_forked("-g", 2, "--pp", 2, "--debug", *places, *more, *sizes, "data.num_workers=0")
    assert re.search(r"first row, [1-9]\d* of \d+ tokens trained, 0 misplaced labels", text)
    assert re.search(r"USER: <image .16>\s+Which digit is shown\? ASSISTANT:« It is \d\.</s>»", text)
    assert "stage 0, tensor rank 0: vision_model: float32 [2, 3, 56, 56] -> float32 [2, 16, 64]" in text
    assert len(re.findall(r"stage 1, tensor rank 0: language_model: ", text)) == 1
    assert re.search(
        r"first iteration done \d+\.\d s after the start of its process: imports \d+\.\d, connecting ", text
    )
    first, second = read_metrics(tmp_path / "save" / "debug")
    assert list(first["start_seconds"]) == PHASES and second["start_seconds"] is None
    assert sum(first["start_seconds"].values()) == first["time_to_first_iteration_seconds"] > first["step_seconds"]
    written = {path.name for path in (tmp_path / "save" / "debug").iterdir()}
    assert {"loss.png", "tensorboard"} <= written and "wandb" not in written
