"""Where metrics go: TensorBoard, Weights & Biases without a network, the picture of the loss."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.training.metrics import Metrics, MetricsFile
from llava_mcore.training.run_ids import KEY, adopt_ids, read_ids
from llava_mcore.training.sinks import PLOT, Sinks, draw_losses

FIRST = "time_to_first_iteration_seconds"


def metrics(iteration: int, loss: float | None, first: float | None = None) -> Metrics:
    values: dict[str, Any] = {field.name: 1.0 for field in fields(Metrics)}
    values |= {"iteration": iteration, "loss": loss, "mfu": None, FIRST: first}
    values["lr_by_part"] = {"language_model": 0.5}
    return Metrics(**values)  # type: ignore[arg-type]


def session(run: RunConfig, iteration: int, losses: list[float | None]) -> None:
    """What a run does that starts behind an iteration."""
    file, sinks = MetricsFile(run.run_dir, keep_until=iteration), Sinks(run, iteration=iteration)
    for number, loss in enumerate(losses, iteration + 1):
        line = metrics(number, loss, first=9.5 if number == iteration + 1 else None)
        file.append(line)
        sinks.step(line)
    sinks.close()


def test_a_resumed_run_goes_on_in_the_same_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}", "logging.wandb=true", "logging.tensorboard=true"])
    run.run_dir.mkdir()
    session(run, 0, [4.0, 3.0, 9.0])
    wandb_id = read_ids(run.run_dir)["wandb"]
    session(run, 2, [2.0, None, 1.0])  # iteration 3 anew; iteration 4 was skipped

    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 4.0), (2, 3.0), (3, 2.0), (5, 1.0)]
    assert [e.step for e in events.Scalars(FIRST)] == [1, 3]
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


def test_a_picture_that_cannot_be_written_takes_no_other_errors_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sinks are closed while the error that ends a run, of a full disk for one, is on its way."""
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}"])
    (run.run_dir / PLOT).mkdir(parents=True)
    session(run, 0, [1.0])
    assert "loss.png cannot be written" in caplog.text


def test_a_copied_checkpoint_brings_the_ids_of_its_run(tmp_path: Path) -> None:
    checkpoint, run_dir = tmp_path / "iter_0000003", tmp_path / "run"
    checkpoint.mkdir()
    run_dir.mkdir()
    adopt_ids(run_dir, checkpoint)  # an import: it has no run.json
    assert read_ids(run_dir) == {}
    (checkpoint / "run.json").write_text(json.dumps({KEY: {"wandb": "abc", "mlflow": "def"}, "files": {}}))
    (run_dir / "mlflow_run_id.txt").write_text("mine\n")
    adopt_ids(run_dir, checkpoint)
    assert read_ids(run_dir) == {"wandb": "abc", "mlflow": "mine"}


def test_mlflow_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}", "logging.mlflow=true", "training.seed=77"])
    run.run_dir.mkdir()
    session(run, 0, [4.0, 3.0])
    run_id = read_ids(run.run_dir)["mlflow"]
    session(run, 2, [2.0])
    assert read_ids(run.run_dir)["mlflow"] == run_id
    client = mlflow.MlflowClient(tracking_uri=(run.run_dir / "mlruns").as_uri())
    history = client.get_metric_history(run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 4.0), (2, 3.0), (3, 2.0)]
    stored = client.get_run(run_id)
    assert (stored.info.status, stored.info.run_name, stored.data.params["training.seed"]) == ("FINISHED", "run", "77")
    (run.run_dir / "mlflow_run_id.txt").write_text("0" * 32)  # of a server that has forgotten it
    session(run, 3, [1.0])
    assert read_ids(run.run_dir)["mlflow"] not in (run_id, "0" * 32)
