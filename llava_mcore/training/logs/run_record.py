"""run.json: settings, versions and progress of the run that wrote a checkpoint; its ids at metric services.

A resumed run continues the same ids.
"""

from __future__ import annotations

import logging
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.choose_start import RUN_ID, ensure_run_id
from llava_mcore.checkpoint.complete import RUN_JSON
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import FileError
from llava_mcore.files.regular import naming, read_object, read_text
from llava_mcore.parallel.groups import Groups

ID_FILES = {"wandb": "wandb_run_id.txt", "mlflow": "mlflow_run_id.txt"}
"""Service -> file with the id, in SAVE_DIR/NAME."""
KEY = "tracking_run_ids"
"""The ids' key in a checkpoint's run.json."""
RANDOM_STATES = "random_states"
"""Key of run.json: which ranks' random states the checkpoint holds. Older ones lack it: of data-parallel rank 0."""
OF_EVERY_RANK = "of every rank"
PACKAGES = (
    *("llava-mcore", "torch", "megatron-core", "megatron-energon", "transformers", "tokenizers"),
    *("safetensors", "numpy", "Pillow", "transformer-engine"),
)


def run_record(run: RunConfig, groups: Groups, counters: dict[str, int]) -> dict[str, Any]:
    """Return the content of run.json without the list of files. `counters`: the progress of the run."""
    return {
        **counters,
        "layout": {
            "tensor_model_parallel_size": groups.tp_size,
            "pipeline_model_parallel_size": groups.pp_size,
            "context_parallel_size": groups.cp_size,
            "data_parallel_size": groups.dp_size,
            "expert_model_parallel_size": groups.ep_size,
            "expert_tensor_parallel_size": groups.etp_size,
            "world_size": groups.world_size,
        },
        RANDOM_STATES: OF_EVERY_RANK,
        RUN_ID: ensure_run_id(run.run_dir),
        KEY: read_ids(run.run_dir),
        "git_revision": git_revision(),
        "versions": versions(),
        "run": run.model_dump(mode="json"),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the packages that a run depends on, those that are installed."""
    versions_by_name = {"python": platform.python_version()}
    if torch.version.cuda is not None:
        versions_by_name["cuda"] = torch.version.cuda
    for name in PACKAGES:
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_by_name


def git_revision() -> str | None:
    """Return the commit of this package's code, with '-dirty' if it was changed since; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


logger = logging.getLogger(__name__)


def read_ids(run_dir: Path) -> dict[str, str]:
    """Return service -> id for the services that the run uses. Raises FileError for a file that is not text."""
    files = {service: run_dir / name for service, name in ID_FILES.items()}
    ids = {service: read_text(file).strip() for service, file in files.items() if file.exists()}
    return {service: run_id for service, run_id in ids.items() if run_id}


def write_id(run_dir: Path, service: str, run_id: str) -> None:
    """Write the id under which a service knows the run."""
    file = run_dir / ID_FILES[service]
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
        if service in ID_FILES and service not in known:
            logger.info("continuing the %s run %s of %s", service, run_id, checkpoint)
            write_id(run_dir, service, run_id)
