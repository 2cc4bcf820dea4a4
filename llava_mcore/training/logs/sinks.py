"""Metrics beyond metrics.jsonl: TensorBoard, Weights & Biases, MLflow, and a plot of the loss."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from llava_mcore.config.schema import RunConfig
from llava_mcore.data.processors.images import decode_image
from llava_mcore.errors import ConfigError
from llava_mcore.files.regular import naming
from llava_mcore.log import warn_on_failure
from llava_mcore.training.answers.result import Example
from llava_mcore.training.logs.metrics_file import FILE, VALIDATION_FILE, Metrics, read_lines
from llava_mcore.training.logs.mlflow_sink import MLflow
from llava_mcore.training.logs.run_record import read_ids, write_id

logger = logging.getLogger(__name__)

WANDB = "wandb"
_START_SECONDS = 60.0
PLOT = "loss.png"
CLOSING_SECONDS = 30.0
"""How long a run waits at its end for a server to take the remaining metrics."""


class Sink(Protocol):
    """Takes numbers by name, at increasing iterations. Raises OSError or RuntimeError if it fails."""

    def write(self, values: dict[str, float], iteration: int) -> None: ...

    def show(self, examples: Sequence[Example], picture: Path, iteration: int) -> None: ...

    def image(self, name: str, path: Path, iteration: int) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """All sinks of a run, on rank 0 only. A sink that fails is dropped with a warning: a run does not end because of a
    copy of its metrics."""

    def __init__(self, run: RunConfig, *, iteration: int) -> None:
        """Open them. `iteration`: where the run resumes; later entries are dropped.

        Raises:
            ConfigError: Weights & Biases or MLflow rejects the run, or does not answer.
            OSError: a folder cannot be created.
        """
        self.run = run
        self.sinks: dict[str, Sink] = {}
        seconds = min(CLOSING_SECONDS, run.faults.timeout / 4)  # the other ranks wait at the end
        if run.logging.tensorboard:
            self.sinks["TensorBoard"] = TensorBoard(run.run_dir / "tensorboard", purge_from=iteration + 1)
        if run.logging.wandb:
            self.sinks["Weights & Biases"] = Wandb(run, seconds)
        if run.logging.mlflow:
            self.sinks["MLflow"] = MLflow(run, seconds)

    def step(self, metrics: Metrics) -> None:
        """Write one iteration."""
        values = {name: float(value) for name, value in metrics.record().items() if isinstance(value, int | float)}
        # Not lr/…: MLflow's file store would need a file and a folder with the same name.
        values |= {f"lr_by_part/{part}": rate for part, rate in metrics.lr_by_part.items()}
        self.write(values, metrics.iteration)

    def write(self, values: dict[str, float], iteration: int) -> None:
        """Write other numbers, such as those of a validation."""
        self._each(iteration, lambda sink: sink.write(values, iteration))

    def show(self, examples: Sequence[Example], picture: Path, iteration: int) -> None:
        """Write a table of answers. `picture`: a file with all of them."""
        self._each(iteration, lambda sink: sink.show(examples, picture, iteration))

    def image(self, name: str, path: Path, iteration: int) -> None:
        """Write an image of a file."""
        self._each(iteration, lambda sink: sink.image(name, path, iteration))

    def _each(self, iteration: int, action: Callable[[Sink], None]) -> None:
        for name, sink in list(self.sinks.items()):
            try:
                action(sink)
            except (OSError, RuntimeError) as error:
                logger.warning("no more metrics of this run go to %s: iteration %d failed: %s", name, iteration, error)
                del self.sinks[name]
                warn_on_failure(name, sink.close)

    def close(self) -> None:
        """Flush and close all sinks, and draw SAVE_DIR/NAME/loss.png. Failures are warnings."""
        for name, sink in self.sinks.items():
            warn_on_failure(name, sink.close)
        warn_on_failure(PLOT, lambda: draw_losses(self.run.run_dir))


class TensorBoard:
    """Event files."""

    def __init__(self, folder: Path, *, purge_from: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # the import takes a second

        self.writer = SummaryWriter(str(folder), purge_step=purge_from)

    def write(self, values: dict[str, float], iteration: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, iteration)

    def show(self, examples: Sequence[Example], picture: Path, iteration: int) -> None:
        self.image("answers", picture, iteration)
        rows = ["| question | expected | answer |", "|---|---|---|"]
        rows += [
            f"| {' | '.join(map(_cell, (x.record.question, x.record.reference, x.record.answer)))} |" for x in examples
        ]
        self.writer.add_text("answers", "\n".join(rows), iteration)

    def image(self, name: str, path: Path, iteration: int) -> None:
        with Image.open(path) as image:
            self.writer.add_image(name, np.asarray(image.convert("RGB")), iteration, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


def _cell(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").replace("<", "&lt;").split())


class Wandb:
    """One Weights & Biases run. A resumed run continues it: its id is in the run's folder."""

    def __init__(self, run: RunConfig, seconds: float) -> None:
        """Open the run.

        Args:
            seconds: how long to wait at the end for unsent metrics; they stay in SAVE_DIR/NAME/wandb.

        Raises:
            ConfigError: Weights & Biases rejects the run, or does not answer.
        """
        import wandb

        if WANDB not in read_ids(run.run_dir):
            write_id(run.run_dir, WANDB, uuid.uuid4().hex[:12])
        limits = {"init_timeout": _START_SECONDS, "finish_timeout": seconds}
        chosen = {name: value for name, value in limits.items() if f"WANDB_{name.upper()}" not in os.environ}
        self._error = wandb.Error
        try:
            self.wandb_run: Any = wandb.init(
                project=run.logging.wandb_project,
                name=run.name,
                id=read_ids(run.run_dir)[WANDB],
                resume="allow",
                dir=run.run_dir,
                config=run.model_dump(mode="json"),
                settings=wandb.Settings(**chosen),
            )
        except wandb.Error as error:
            advice = "log in with 'wandb login', or set WANDB_MODE=offline, which needs no network"
            raise ConfigError(f"--wandb: {error}; {advice}") from error

    def write(self, values: dict[str, float], iteration: int) -> None:
        """Log numbers. Raises RuntimeError if the Weights & Biases process has failed."""
        self._log(values, iteration)

    def _log(self, values: Mapping[str, Any], iteration: int) -> None:
        try:
            self.wandb_run.log(values, step=iteration)
        except self._error as error:
            raise RuntimeError(str(error)) from error

    def show(self, examples: Sequence[Example], picture: Path, iteration: int) -> None:
        """Log a table with the images. Raises RuntimeError as `write`."""
        import wandb

        table = wandb.Table(columns=["image", "question", "expected", "answer"])
        for example in examples:
            image = None if example.picture is None else wandb.Image(decode_image(example.picture))
            table.add_data(image, example.record.question, example.record.reference, example.record.answer)
        self._log({"answers/examples": table}, iteration)

    def image(self, name: str, path: Path, iteration: int) -> None:
        """Log an image. Raises RuntimeError as `write`."""
        import wandb

        self._log({name: wandb.Image(str(path))}, iteration)

    def close(self) -> None:
        """Finish the run. Raises RuntimeError if that fails."""
        try:
            self.wandb_run.finish()
        except self._error as error:
            raise RuntimeError(str(error)) from error


def draw_losses(run_dir: Path) -> Path | None:
    """Draw training and validation loss over the iterations into loss.png; return its path, or None without any
    losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.figure import Figure

    trained = _points(run_dir / FILE, "loss")
    if not trained:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss", title=run_dir.name)
    axes.plot(*zip(*trained, strict=True), linewidth=1, label="training")
    validated = _points(run_dir / VALIDATION_FILE, "loss")
    if validated:
        axes.plot(*zip(*validated, strict=True), linewidth=1, marker="o", markersize=3, label="validation")
    axes.grid(alpha=0.3)
    axes.legend()
    with naming(run_dir / PLOT):
        figure.savefig(run_dir / PLOT)
    return run_dir / PLOT


def _points(file: Path, name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) pairs of a file of JSON lines, without iterations that were not trained on."""
    return [(record["iteration"], record[name]) for record in read_lines(file) if record[name] is not None]
