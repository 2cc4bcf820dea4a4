"""Metrics to Weights & Biases. Its own process sends them: training waits for it only at the start and the end."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_mcore.config.schema import RunConfig
from llava_mcore.data.processors.images import decode_image
from llava_mcore.errors import ConfigError
from llava_mcore.training.answers.result import Example
from llava_mcore.training.run_ids import read_ids, write_id

SERVICE = "wandb"
_START_SECONDS = 60.0


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

        if SERVICE not in read_ids(run.run_dir):
            write_id(run.run_dir, SERVICE, uuid.uuid4().hex[:12])
        limits = {"init_timeout": _START_SECONDS, "finish_timeout": seconds}
        chosen = {name: value for name, value in limits.items() if f"WANDB_{name.upper()}" not in os.environ}
        self._error = wandb.Error
        try:
            self.wandb_run: Any = wandb.init(
                project=run.logging.wandb_project,
                name=run.name,
                id=read_ids(run.run_dir)[SERVICE],
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
        try:
            self.wandb_run.log(values, step=iteration)
        except self._error as error:
            raise RuntimeError(str(error)) from error

    def show(self, examples: Sequence[Example], picture: Path, iteration: int) -> None:
        """Log a table with the pictures. Raises RuntimeError as `write`."""
        import wandb

        table = wandb.Table(columns=["picture", "question", "expected", "answer"])
        for example in examples:
            image = None if example.picture is None else wandb.Image(decode_image(example.picture))
            table.add_data(image, example.record.question, example.record.reference, example.record.answer)
        try:
            self.wandb_run.log({"answers/examples": table}, step=iteration)
        except self._error as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        """Finish the run. Raises RuntimeError if that fails."""
        try:
            self.wandb_run.finish()
        except self._error as error:
            raise RuntimeError(str(error)) from error
