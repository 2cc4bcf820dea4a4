"""Where metrics go: TensorBoard, Weights & Biases without a network, the picture of the loss."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.training.metrics import Metrics, MetricsFile
from llava_mcore.training.sinks import FIRST, PLOT, WANDB_ID, Sinks, draw_losses


def metrics(iteration: int, loss: float | None) -> Metrics:
    values = {field.name: 1.0 for field in fields(Metrics)} | {"iteration": iteration, "loss": loss, "mfu": None}
    values["lr_by_part"] = {"language_model": 0.5}
    return Metrics(**values)  # type: ignore[arg-type]


def session(run: RunConfig, iteration: int, losses: list[float | None]) -> None:
    """What a run does that starts behind an iteration."""
    file, sinks = MetricsFile(run.run_dir, keep_until=iteration), Sinks(run, iteration=iteration)
    for number, loss in enumerate(losses, iteration + 1):
        file.append(metrics(number, loss))
        sinks.step(metrics(number, loss))
    sinks.close()


def test_a_resumed_run_goes_on_in_the_same_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}", "logging.wandb=true", "logging.tensorboard=true"])
    run.run_dir.mkdir()
    session(run, 0, [4.0, 3.0, 9.0])
    wandb_id = (run.run_dir / WANDB_ID).read_text()
    session(run, 2, [2.0, None, 1.0])  # iteration 3 anew; iteration 4 was skipped

    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 4.0), (2, 3.0), (3, 2.0), (5, 1.0)]
    assert [e.step for e in events.Scalars(FIRST)] == [1, 3]
    assert all(e.value > 0 for e in events.Scalars(FIRST))
    folders = list((run.run_dir / "wandb").glob("offline-run-*"))
    assert len(folders) in (1, 2) and all(folder.name.endswith(f"-{wandb_id}") for folder in folders)
    assert Image.open(run.run_dir / PLOT).size == (960, 540)


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}"])
    run.run_dir.mkdir()
    session(run, 0, [1.0])
    assert sorted(path.name for path in run.run_dir.iterdir()) == [PLOT, "metrics.jsonl"]
    (run.run_dir / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": None}) + "\n")
    assert draw_losses(run.run_dir) is None
