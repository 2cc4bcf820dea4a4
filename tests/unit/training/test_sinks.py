"""Metric sinks: TensorBoard, Weights & Biases offline, MLflow, the plot of the loss."""

from __future__ import annotations

import errno
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError, FileError
from llava_mcore.training.logs.metrics_file import Metrics, MetricsFile, read_lines
from llava_mcore.training.logs.run_record import KEY, adopt_ids, read_ids, write_id
from llava_mcore.training.logs.sinks import PLOT, Sinks, draw_losses
from tests.helpers.mlflow_server import RUN_ID, MLflowServer

FIRST = "time_to_first_iteration_seconds"


def metrics(iteration: int, loss: float | None, first: float | None = None) -> Metrics:
    values: dict[str, Any] = {field.name: 1.0 for field in fields(Metrics)}
    phases = None if first is None else {"imports": first}
    values |= {"iteration": iteration, "loss": loss, "mfu": None, FIRST: first, "start_seconds": phases}
    values |= {"lr_by_part": {"language_model": 0.5}, "sums": {}}
    return Metrics(**values)  # type: ignore[arg-type]


def session(run: RunConfig, iteration: int, losses: list[float | None]) -> None:
    """Write the metrics of a run that starts after `iteration`."""
    file, sinks = MetricsFile(run.run_dir, keep_until=iteration), Sinks(run, iteration=iteration)
    for number, loss in enumerate(losses, iteration + 1):
        line = metrics(number, loss, first=9.5 if number == iteration + 1 else None)
        file.append(line)
        sinks.step(line)
    sinks.close()


def test_a_resumed_run_continues_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}", "logging.wandb=true", "logging.tensorboard=true"])
    run.run_dir.mkdir()
    session(run, 0, [4.0, 3.0, 9.0])
    wandb_id = read_ids(run.run_dir)["wandb"]
    first = next((run.run_dir / "wandb").glob("offline-run-*"))
    while first.name == f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-{wandb_id}":
        time.sleep(0.05)  # wandb names folders by the second: within one, both sessions would share a folder
    session(run, 2, [2.0, None, 1.0])  # iteration 3 again; iteration 4 was skipped

    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 4.0), (2, 3.0), (3, 2.0), (5, 1.0)]
    assert [e.step for e in events.Scalars(FIRST)] == [1, 3]
    folders = list((run.run_dir / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(f"-{wandb_id}") for folder in folders)
    assert Image.open(run.run_dir / PLOT).size == (960, 540)


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}"])
    run.run_dir.mkdir()
    session(run, 0, [1.0])
    assert sorted(path.name for path in run.run_dir.iterdir()) == [PLOT, "metrics.jsonl"]
    (run.run_dir / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": None}) + "\n")
    assert draw_losses(run.run_dir) is None


def test_a_plot_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sinks are closed while the error that ends a run is being raised; they must not replace it."""
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}"])
    (run.run_dir / PLOT).mkdir(parents=True)
    session(run, 0, [1.0])
    assert "loss.png: " in caplog.text and "Is a directory" in caplog.text


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
    """A resumed run continues the same MLflow run."""
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
    assert len(client.get_metric_history(run_id, "lr_by_part/language_model")) == 3
    stored = client.get_run(run_id)
    assert (stored.info.status, stored.info.run_name, stored.data.params["training.seed"]) == ("FINISHED", "run", "77")
    (run.run_dir / "mlflow_run_id.txt").write_text("0" * 32)  # of a server that has forgotten it
    session(run, 3, [1.0])
    assert read_ids(run.run_dir)["mlflow"] not in (run_id, "0" * 32)


def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, *more: str) -> RunConfig:
    """Return a run that logs to an MLflow server, with a timeout of one second per call."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}", "logging.mlflow=true", "faults.timeout=4", *more])
    run.run_dir.mkdir()
    return run


def test_mlflow_on_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each metric arrives once, and the run is ended."""
    with MLflowServer() as server:
        session(served(tmp_path, monkeypatch, server.uri), 0, [4.0, 3.0])
    assert [point for point in server.points if point[0] == "loss"] == [("loss", 1, 4.0), ("loss", 2, 3.0)]
    assert server.ended


def test_a_server_that_stops_answering_costs_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with MLflowServer() as server:
        run = served(tmp_path, monkeypatch, server.uri)
        sinks = Sinks(run, iteration=0)
        server.answers = False
        before, start = random.getstate(), time.monotonic()
        for iteration in range(1, 201):
            sinks.step(metrics(iteration, 1.0))
        assert time.monotonic() - start < 1
        sinks.close()
        assert time.monotonic() - start < 3
        assert random.getstate() == before, "training may use this generator"
    assert "200 records within 1 s; metrics.jsonl has all of them" in caplog.text


def test_a_new_run_needs_a_server_that_answers_but_a_resumed_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with MLflowServer(answers=False) as server:
        run = served(tmp_path, monkeypatch, server.uri)
        with pytest.raises(ConfigError, match=rf"--mlflow: {server.uri}: .*timed? ?out"):
            Sinks(run, iteration=0)
        write_id(run.run_dir, "mlflow", RUN_ID)
        sinks = Sinks(run, iteration=3)
        server.answers = True
        sinks.step(metrics(4, 2.0))
        sinks.close()
    assert "MLflow does not answer; metrics are kept for a while" in caplog.text
    assert ("loss", 4, 2.0) in server.points and server.ended


class Broken:
    """A sink on a full disk."""

    writes = closes = 0

    def write(self, values: dict[str, float], iteration: int) -> None:
        self.writes += 1
        raise OSError(errno.ENOSPC, "No space left on device", "/events")

    def show(self, *_: Any) -> None: ...

    def image(self, *_: Any) -> None: ...

    def close(self) -> None:
        self.closes += 1
        raise RuntimeError("still\nfull")


def test_a_sink_that_fails_is_dropped_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}", "logging.tensorboard=true"])
    run.run_dir.mkdir()
    sinks, broken = Sinks(run, iteration=0), Broken()
    sinks.sinks = {"broken": broken, **sinks.sinks}
    for iteration in (1, 2):
        sinks.step(metrics(iteration, 1.0))
    sinks.close()
    assert (broken.writes, broken.closes) == (1, 1)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("no more metrics of this run go to broken: iteration 1 failed: ")
    assert said[1] == "broken: still full"
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2]


def test_a_truncated_last_line_is_skipped(tmp_path: Path) -> None:
    """A full disk leaves such a line: the plot and a resumed run ignore it."""
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}"])
    run.run_dir.mkdir()
    session(run, 0, [4.0, 3.0])
    (run.run_dir / PLOT).unlink()
    file = run.run_dir / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"iteration": 3, "lo')
    assert draw_losses(run.run_dir) == run.run_dir / PLOT
    assert [record["iteration"] for record in read_lines(file)] == [1, 2]
    session(run, 2, [2.0])
    assert [record["loss"] for record in read_lines(file)] == [4.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1]", "expected a JSON object, found a list"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON (nested too deeply)"),
        ('{"iteration": "1"}', "expected 'iteration' and 'loss'"),
        ('{"iteration": 1, "loss": "x"}', "expected 'iteration' and 'loss'"),
    ],
)
def test_invalid_lines_are_reported_with_their_number(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 0, "loss": null}\n' + line + "\n")
    with pytest.raises(FileError, match=f"metrics.jsonl, line 2: {re.escape(says)}"):
        MetricsFile(tmp_path, keep_until=3)
    file.write_bytes(b"\xff\n")
    with pytest.raises(FileError, match="not UTF-8 text"):
        MetricsFile(tmp_path, keep_until=3)


def test_a_full_disk_leaves_only_whole_lines(tmp_path: Path, tiny_disk: Callable[[str], Path]) -> None:
    disk = tiny_disk("16K")
    file = MetricsFile(disk, keep_until=0)
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        for iteration in range(1000):
            file.append(metrics(iteration, 1.0))
    number = len(read_lines(disk / "metrics.jsonl"))
    assert number > 3 and (disk / "metrics.jsonl").read_bytes().count(b"\n") == number
    assert (disk / "metrics.jsonl").read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    "content", ["[]", "null", "{", '{"tracking_run_ids": ["a"]}', '{"tracking_run_ids": {"a": 1}}']
)
def test_an_invalid_run_json_is_reported(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(FileError, match=r"run\.json: "):
        adopt_ids(tmp_path, tmp_path)
