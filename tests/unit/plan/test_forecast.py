"""What run.py says of a prediction: before the start, after the first iterations, and where memory is missing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run
from llava_mcore.config.schema import RunConfig
from llava_mcore.launch import forecast as launch
from llava_mcore.plan.forecast import Forecast, balanced, forecast
from llava_mcore.plan.sizes.read_config import read_model
from llava_mcore.training.logs.forecast import COMPARED, WARM_UP, BesideForecast
from tests.unit.plan.test_command import LLAVA_7B

H100 = "NVIDIA H100 80GB HBM3"
BALANCE = "parallel.balance"
PP = "parallel.pipeline_model_parallel_size"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_7B), encoding="utf-8")
    return tmp_path


def run_of(folder: Path, **flags: Any) -> RunConfig:
    values = {
        "data.packing": True,
        "data.seq_length": 4096,
        "training.global_batch_size": 96,
        "checkpoint.hf_dir": folder,
    }
    values |= {"parallel.use_distributed_optimizer": True, "training.train_iters": 10, "checkpoint.save_dir": folder}
    return load_run_config(None, (), values | {key.replace("__", "."): value for key, value in flags.items()})


def predicted(folder: Path, device: str = H100, **flags: Any) -> Forecast | None:
    return forecast(run_of(folder, **flags), 2, lambda: read_model(folder), device)


def test_a_run_that_cannot_fit_is_told_with_a_layout_that_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_name", lambda: H100)
    large = run_of(folder, training__micro_batch_size=4)
    warning = launch.memory_warning(large, 1, 1)
    assert warning is not None
    assert "of a h100's 79, and no other layout fits" in warning
    warning = launch.memory_warning(large, 8, 8)
    assert warning is not None
    # With the flags that it names, the run fits.
    flags = warning.partition("the nearest layout that fits, in ")[2].partition(": ")[2].split()
    typed = ["--packing", "--seq-length", "4096", "--global-batch-size", "96", "--tokenizer-load-dir", str(folder)]
    typed += ["--dist-optim", "--micro-batch-size", "4", *flags]
    assert launch.memory_warning(parse_command_line(typed, "train").load(), 8, 8) is None
    assert launch.memory_warning(large, 8, 0) is None  # no GPUs


def test_what_a_plan_does_not_know_is_not_predicted(folder: Path) -> None:
    assert predicted(folder, "Some other GPU") is None
    assert predicted(folder, training__precision="fp32") is None
    assert predicted(folder, data__seq_length=16) is None  # no sample is short enough
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert predicted(folder) is None


def test_measured_iterations_stand_beside_the_prediction(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = predicted(folder, "NVIDIA H200", training__micro_batch_size=2)
    assert known is not None
    seconds, gib = known.prediction.seconds, known.reserved(0)

    def log_of(factor: float) -> list[logging.LogRecord]:
        caplog.clear()
        beside = BesideForecast(known, 0)
        with caplog.at_level(logging.INFO):
            for _ in range(WARM_UP):
                beside.step(100 * seconds, gib)
            for _ in range(2 * COMPARED):
                beside.step(factor * seconds, gib)
        return list(caplog.records)

    (record,) = log_of(1.05)
    assert record.levelno == logging.INFO
    assert "measured: " in record.message
    assert "(+5%)" in record.message
    (record,) = log_of(1.2)
    assert record.levelno == logging.WARNING
    assert "more than 10 % off" in record.message
    assert f"{gib:.1f} GiB on a GPU of pipeline stage 0" in known.out_of_memory(0)


def test_balanced_stages_are_numbers_of_layers_that_the_rules_accept(folder: Path) -> None:
    with_auto = run_of(folder, **{"parallel__balance": "auto", "parallel__pipeline_model_parallel_size": 4})
    assert check_run(with_auto, read_model(folder).dims(), 4, device_available=True) == []
    run = launch.completed(with_auto, 4, 0).run
    assert run.parallel.balance == "none"
    first = run.parallel.num_layers_in_first_pipeline_stage
    assert first is None or first <= 8
    assert check_run(run, read_model(folder).dims(), 4, device_available=True) == []
    # A trained tower of a fifth of the model's work takes layers away from its stage.
    heavy = LLAVA_7B["vision_config"] | {"num_hidden_layers": 48, "hidden_size": 3200, "intermediate_size": 12800}
    (folder / "config.json").write_text(
        json.dumps({**LLAVA_7B, "vision_config": heavy | {"num_attention_heads": 25}}), encoding="utf-8"
    )
    flags = {BALANCE: "auto", PP: 2, "model.freeze_vision_model": False}
    two = balanced(run_of(folder, **{k.replace(".", "__"): v for k, v in flags.items()}), 2, folder, H100)
    assert two.parallel.num_layers_in_first_pipeline_stage is not None
    assert two.parallel.num_layers_in_first_pipeline_stage < 13
    # One stage has nothing to balance, and contradictions are left to the rule.
    refused = run_of(folder, **{"parallel__balance": "auto", PP.replace(".", "__"): 2})
    refused = refused.model_copy(
        update={"parallel": refused.parallel.model_copy(update={"num_layers_in_last_pipeline_stage": 3})}
    )
    assert launch.completed(refused, 2, 0).run == refused
    problems = check_run(refused, read_model(folder).dims(), 2, device_available=True)
    assert any("omit parallel.num_layers_in_last_pipeline_stage" in x for x in problems)
