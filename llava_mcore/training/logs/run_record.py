"""run.json: the settings, versions and progress of the run that wrote a checkpoint."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.identity import RUN_ID, ensure_run_id
from llava_mcore.config.schema import RunConfig
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.run_ids import KEY, read_ids

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
            "data_parallel_size": groups.dp_size,
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
