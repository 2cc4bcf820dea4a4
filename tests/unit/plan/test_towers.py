"""The choice between divided and whole towers (--vision-data-parallel auto)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_check import compare
from benchmarks.plan_rows import rows
from benchmarks.shapes import SHAPES, make_hf_folder
from llava_mcore.cli import plan
from llava_mcore.config.load import save_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.launch import forecast as launch
from llava_mcore.launch.nodes import Nodes
from llava_mcore.launch.start import Launch
from llava_mcore.plan.forecast import chosen_tower, with_tower
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import GPUS
from llava_mcore.plan.material import images_share
from llava_mcore.plan.search import TOWERS, Searched, changed
from llava_mcore.plan.seconds import Machine
from llava_mcore.plan.sizes.read_config import read_model
from llava_mcore.plan.work import Sample, like_llava
from tests.unit.plan.test_command import LLAVA_7B
from tests.unit.plan.test_forecast import run_of
from tests.unit.plan.test_predict import MODEL, layout

MEASURED = "train_step_qwen2_5_vl_2_whole_tower.json"
TP = "parallel.tensor_model_parallel_size"
H200 = GPUS["h200"]
LARGE = LLAVA_7B["vision_config"] | {"num_hidden_layers": 33, "hidden_size": 1280, "intermediate_size": 5120}
MODEL_OF_IMAGES = LLAVA_7B | {"vision_config": LARGE}
MANY = [Sample(16, 8, ((640, 480),) * 7)] * 8
"""Seven images in nearly every token of a pack: two packs have an even number."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, MODEL_OF_IMAGES)
    return tmp_path


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def searched(folder: Path, samples: list[Sample], tp: int = 2, **flags: Any) -> Searched:
    trained = {"model__freeze_vision_model": False, "training__micro_batch_size": 2}
    run = run_of(folder, **{TP.replace(".", "__"): tp, **trained, **flags})
    return Searched(read_model(folder), samples, run, tp, Machine(H200, Efficiency()))


def test_the_choice_is_the_one_that_was_measured_to_be_faster(tmp_path: Path) -> None:
    make_hf_folder(tmp_path, "qwen2.5-vl-7b", seq_length=8192)
    model = read_model(tmp_path)
    of_file = {row.run.parallel.vision_data_parallel: row for row in rows() if row.source == MEASURED}
    off, on = (compare(of_file[x], model) for x in ("off", "on"))
    assert on.row.seconds < off.row.seconds
    measured, predicted = (off.row.seconds / on.row.seconds, off.prediction.seconds / on.prediction.seconds)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert on.prediction.reserved > off.prediction.reserved
    samples = like_llava(SHAPES["qwen2.5-vl-7b"].sizes)
    run = changed(of_file["on"].run, {TOWERS: "auto"})
    chosen = chosen_tower(Searched(model, samples, run, 2, Machine(H200, Efficiency())), H200)
    assert chosen.run == of_file["on"].run
    assert chosen.words is not None
    assert f"{on.prediction.seconds:.3f} s per iteration, otherwise {off.prediction.seconds:.3f}" in chosen.words


def test_a_tower_is_divided_where_processes_would_wait_for_one_image(folder: Path) -> None:
    """A micro-batch of one image: one rank computes it alone, or all of them an eighth of every layer."""
    single = [Sample(60, 30, ((640, 480),))] * 8
    flags = {"data__packing": False, "training__micro_batch_size": 1, "training__global_batch_size": 64}
    alone = chosen_tower(searched(folder, single, tp=8, **flags), H200)
    assert alone.run.parallel.vision_data_parallel == "off"
    assert "the processes of --tp divide its layers; predicted for a h200" in (alone.words or "")
    many = chosen_tower(searched(folder, MANY), H200)
    assert many.run.parallel.vision_data_parallel == "on"


def test_what_does_not_fit_and_what_rules_refuse_is_not_chosen(folder: Path) -> None:
    many = searched(folder, MANY)
    whole, divided = (many.predict(changed(many.run, {TOWERS: x})) for x in ("on", "off"))
    assert chosen_tower(many, H200).run.parallel.vision_data_parallel == "on"
    small = replace(H200, memory=(whole.memory + divided.memory) / 2 / 0.95)
    chosen = chosen_tower(many, small)
    assert chosen.run.parallel.vision_data_parallel == "off" and "whole ones would need" in (chosen.words or "")
    # Heads that two processes cannot divide, and what both choices have in common.
    write(folder, MODEL_OF_IMAGES | {"vision_config": LARGE | {"num_attention_heads": 5}})
    chosen = chosen_tower(searched(folder, MANY), small)
    assert chosen.run.parallel.vision_data_parallel == "on" and "cannot be divided" in (chosen.words or "")
    refused = chosen_tower(searched(folder, MANY, training__global_batch_size=3), small)
    assert refused.words is not None  # the heads still decide
    write(folder, MODEL_OF_IMAGES)
    refused = chosen_tower(searched(folder, MANY, training__micro_batch_size=5), small)
    assert refused.words is None and refused.run.parallel.vision_data_parallel == "off"


def test_a_run_has_the_choice_in_its_file_and_says_when_it_changes(folder: Path) -> None:
    trained = {"model__freeze_vision_model": False, "launch__num_gpus": 2}
    run = run_of(folder, **{TP.replace(".", "__"): 2, **trained})
    one, two = launch.completed(run, 2, 0), launch.completed(run, 2, 0)
    assert one == two and one.run.parallel.vision_data_parallel in ("on", "off")
    assert launch.completed(one.run, 2, 0).run == one.run and launch.completed(one.run, 2, 0).words is None
    alone = run_of(folder)
    assert launch.completed(alone, 2, 0).run == alone  # nothing to choose
    write(folder, {})
    assert launch.completed(run, 2, 0).run.parallel.vision_data_parallel == "off"
    # What the log says.
    file = folder / "run.yaml"

    def said(now: RunConfig) -> str:
        return Launch(now, Nodes(1, 0, "localhost", 0, "run"), file, [], 0, None, one.words).layout

    assert one.words is not None and said(one.run).endswith(one.words)
    save_run_config(one.run, file)
    assert said(one.run).endswith(one.words)
    save_run_config(changed(one.run, {TOWERS: "off"}), file)
    assert said(changed(one.run, {TOWERS: "on"})).endswith("it was off before: a size, the data or the GPU has changed")


def test_a_plan_predicts_what_will_be_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--hf-dir", str(folder), "-g", "2", "--tp", "2", "--packing", "--global-batch-size", "96", "--dist-optim"]
    typed += ["--seq-length", "4096", "model.freeze_vision_model=false", "--as-given"]
    trained = {TP.replace(".", "__"): 2, "model__freeze_vision_model": False}
    chosen = with_tower(run_of(folder, **trained), 2, folder, H200.devices[0])
    shown = {}
    for value in ("auto", "on", "off"):
        plan.main([*typed, "--vision-data-parallel", value])
        shown[value] = capsys.readouterr().out
    assert shown["on"] != shown["off"] and shown["auto"] == shown[chosen.run.parallel.vision_data_parallel]


def test_ranks_get_images_as_they_will(folder: Path) -> None:
    flags = {TP: 2, TOWERS: "on", "data.packing": False, "training.micro_batch_size": 1}
    three = [Sample(60, 30, ((640, 480),) * 3)]
    assert images_share(MODEL, layout(2, **flags), three) == pytest.approx(2 / 3)
    assert images_share(MODEL, layout(2, **flags | {"training.micro_batch_size": 2}), three * 2) == pytest.approx(1 / 2)
    assert images_share(MODEL, layout(2, **flags | {TOWERS: "off"}), three) == 1
