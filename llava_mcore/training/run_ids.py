"""The run's ids at metric services: a resumed run continues the same ones."""

from __future__ import annotations

import logging
from pathlib import Path

from llava_mcore.checkpoint.complete import RUN_JSON
from llava_mcore.errors import FileError
from llava_mcore.files.regular import naming, read_object, read_text

logger = logging.getLogger(__name__)

FILES = {"wandb": "wandb_run_id.txt", "mlflow": "mlflow_run_id.txt"}
"""Service -> file with the id, in SAVE_DIR/NAME."""
KEY = "tracking_run_ids"
"""The ids' key in a checkpoint's run.json."""


def read_ids(run_dir: Path) -> dict[str, str]:
    """Return service -> id for the services that the run uses. Raises FileError for a file that is not text."""
    files = {service: run_dir / name for service, name in FILES.items()}
    ids = {service: read_text(file).strip() for service, file in files.items() if file.exists()}
    return {service: run_id for service, run_id in ids.items() if run_id}


def write_id(run_dir: Path, service: str, run_id: str) -> None:
    """Write the id under which a service knows the run."""
    file = run_dir / FILES[service]
    with naming(file):
        file.write_text(run_id, encoding="utf-8")


def adopt_ids(run_dir: Path, checkpoint: Path) -> None:
    """Take over ids from a checkpoint that was copied here, unless the run's folder has its own.

    Raises:
        FileError: its run.json does not hold what a run writes.
    """
    record = checkpoint / RUN_JSON
    stored = read_object(record).get(KEY, {}) if record.is_file() else {}
    if not isinstance(stored, dict) or not all(isinstance(run_id, str) for run_id in stored.values()):
        raise FileError(f"{record}: {KEY}: expected the id of each service, found {str(stored)[:80]}")
    known = read_ids(run_dir)
    for service, run_id in stored.items():
        if service in FILES and service not in known:
            logger.info("continuing the %s run %s of %s", service, run_id, checkpoint)
            write_id(run_dir, service, run_id)
