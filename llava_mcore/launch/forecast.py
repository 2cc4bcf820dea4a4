"""Predictions for a run before it starts: the layers of balanced stages, and a warning if it cannot fit."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from llava_mcore.config.rules.parallel import check_balance
from llava_mcore.config.schema import RunConfig
from llava_mcore.launch.preflight import with_epochs
from llava_mcore.plan.forecast import ChosenTower, balanced, forecast, with_tower
from llava_mcore.plan.sizes.read_config import read_model


def completed(run: RunConfig, world_size: int, gpu_count: int) -> ChosenTower:
    """Return a run with the values that follow from its data and its model: samples of an epoch, layers of stages,
    whether its tower is divided, with a line that says so.

    Raises:
        DataError, ConfigError, CheckpointError: data or model cannot be read.
    """
    run = with_epochs(run)
    device = device_name() if gpu_count else None
    tower = ChosenTower(run)
    if run.parallel.tensor_model_parallel_size > 1:
        tower = with_tower(run, world_size, _model_folder(run), device)
    run, parallel = tower.run, run.parallel
    if parallel.balance == "none" or [*check_balance(parallel)]:  # a rule reports it
        return tower
    if parallel.pipeline_model_parallel_size == 1:
        return tower
    return replace(tower, run=balanced(run, world_size, _model_folder(run), device))


def memory_warning(run: RunConfig, world_size: int, gpu_count: int) -> str | None:
    """Return a warning if a run will not fit into this machine's GPUs, with the closest layout that would; None if it
    may fit, or if the GPUs are not known."""
    device = device_name() if gpu_count else None
    if device is None:
        return None
    predicted = forecast(run, world_size, lambda: read_model(_model_folder(run)), device)
    return None if predicted is None else predicted.warning()


def device_name() -> str | None:
    """Return the name of this machine's GPUs without starting CUDA; None if there are several kinds, or no
    nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = {line.strip() for line in said.splitlines() if line.strip()}
    return names.pop() if len(names) == 1 else None


def _model_folder(run: RunConfig) -> Path:
    """Return the Hugging Face folder of a run's model."""
    from llava_mcore.checkpoint.choose_start import start_point

    return run.checkpoint.hf_dir or start_point(run).hf_dir
