"""The run's names at services that collect metrics: a resumed run goes on in the same ones."""

from __future__ import annotations

import logging
from pathlib import Path

from llava_mcore.checkpoint.complete import RUN_JSON
from llava_mcore.checkpoint.plain_files import read_json

logger = logging.getLogger(__name__)

FILES = {"wandb": "wandb_run_id.txt", "mlflow": "mlflow_run_id.txt"}
"""Service -> file in SAVE_DIR/NAME."""
KEY = "tracking_run_ids"
"""Where run.json of a checkpoint has them."""


def read_ids(run_dir: Path) -> dict[str, str]:
    """Return service -> id, of the services that the run has been told to."""
    files = {service: run_dir / name for service, name in FILES.items()}
    return {service: file.read_text(encoding="utf-8").strip() for service, file in files.items() if file.is_file()}


def write_id(run_dir: Path, service: str, run_id: str) -> None:
    """Note under which id a service knows the run."""
    (run_dir / FILES[service]).write_text(run_id, encoding="utf-8")


def adopt_ids(run_dir: Path, checkpoint: Path) -> None:
    """Take over what a checkpoint knows and the run's folder does not: the checkpoint was copied here."""
    record = checkpoint / RUN_JSON
    stored = read_json(record).get(KEY, {}) if record.is_file() else {}
    known = read_ids(run_dir)
    for service, run_id in stored.items():
        if service in FILES and service not in known:
            logger.info("going on in the %s run %s of %s", service, run_id, checkpoint)
            write_id(run_dir, service, run_id)
