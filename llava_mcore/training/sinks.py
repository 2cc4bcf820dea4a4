"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, and a picture of the loss."""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError
from llava_mcore.training.metrics import FILE, VALIDATION_FILE, Metrics
from llava_mcore.training.mlflow_sink import MLflow
from llava_mcore.training.run_ids import read_ids, write_id

logger = logging.getLogger(__name__)

PLOT = "loss.png"


class Sink(Protocol):
    """Takes numbers by name, at iterations that rise."""

    def write(self, values: dict[str, float], iteration: int) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """All sinks that a run asks for; used on rank 0 only."""

    def __init__(self, run: RunConfig, *, iteration: int) -> None:
        """Open them. `iteration`: where the run goes on from; what was written beyond it is given up.

        Raises ConfigError if Weights & Biases refuses the run.
        """
        self.run = run
        self.sinks: list[Sink] = []
        if run.logging.tensorboard:
            self.sinks.append(TensorBoard(run.run_dir / "tensorboard", purge_from=iteration + 1))
        if run.logging.wandb:
            self.sinks.append(Wandb(run))
        if run.logging.mlflow:
            self.sinks.append(MLflow(run))

    def step(self, metrics: Metrics) -> None:
        """Write one iteration."""
        values = {name: float(value) for name, value in asdict(metrics).items() if isinstance(value, int | float)}
        values |= {f"lr/{part}": rate for part, rate in metrics.lr_by_part.items()}
        self.write(values, metrics.iteration)

    def write(self, values: dict[str, float], iteration: int) -> None:
        """Write other numbers, such as those of a validation."""
        for sink in self.sinks:
            sink.write(values, iteration)

    def close(self) -> None:
        """Flush and end all, and draw SAVE_DIR/NAME/loss.png."""
        for sink in self.sinks:
            sink.close()
        try:
            draw_losses(self.run.run_dir)
        except OSError as error:  # a full disk has been told, or will be: not in the place of that message
            logger.warning("loss.png cannot be written: %s", error)


class TensorBoard:
    """Event files."""

    def __init__(self, folder: Path, *, purge_from: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports for a second

        self.writer = SummaryWriter(str(folder), purge_step=purge_from)

    def write(self, values: dict[str, float], iteration: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """One run of Weights & Biases, the same one after a resume: its id lies in the run's folder."""

    def __init__(self, run: RunConfig) -> None:
        import wandb

        if "wandb" not in read_ids(run.run_dir):
            write_id(run.run_dir, "wandb", uuid.uuid4().hex[:12])
        try:
            self.wandb_run: Any = wandb.init(
                project=run.logging.wandb_project,
                name=run.name,
                id=read_ids(run.run_dir)["wandb"],
                resume="allow",
                dir=run.run_dir,
                config=run.model_dump(mode="json"),
            )
        except wandb.Error as error:
            raise ConfigError(f"--wandb: {error}; log in with 'wandb login', or set WANDB_MODE=offline") from error

    def write(self, values: dict[str, float], iteration: int) -> None:
        self.wandb_run.log(values, step=iteration)

    def close(self) -> None:
        self.wandb_run.finish()


def draw_losses(run_dir: Path) -> Path | None:
    """Draw training and validation loss over the iterations into loss.png; None where nothing was trained."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imports for a second
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
    figure.savefig(run_dir / PLOT)
    return run_dir / PLOT


def _points(file: Path, name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) of a file of JSON lines, without lines that were not trained on."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines]
    return [(line["iteration"], line[name]) for line in found if line[name] is not None]
