"""The batch file of a run: written beside its outputs and handed to SLURM."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llava_mcore.config.launch import LaunchConfig
from llava_mcore.errors import ConfigError
from llava_mcore.launch.singularity import REPOSITORY

FILE = "train.sbatch"
SECONDS_BEFORE_LIMIT = 300
"""How long before its time limit a job is told to save and end."""


def batch_file(name: str, launch: LaunchConfig, run_dir: Path, arguments: Sequence[str], *, on_gpus: bool) -> str:
    """Return the text of a batch file that runs `run.py arguments` on each node, from the folder it was submitted in.

    Args:
        arguments: the command line without --submit.
        on_gpus: whether to ask for `num_gpus` GPUs a node.
    """
    options = [
        f"--job-name={name}",
        f"--nodes={launch.num_nodes or 1}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={launch.num_gpus}"] if on_gpus else []),
        f"--output={launch.slurm_output_name or run_dir / 'slurm-%j.out'}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SECONDS_BEFORE_LIMIT}",
        *shlex.split(launch.sbatch_options or ""),
    ]
    command = [sys.executable, str(REPOSITORY / "scripts" / "train" / "run.py"), *arguments]
    on_nodes = shlex.join(["bash", str(REPOSITORY / "scripts" / "slurm" / "on_each_node.sh"), *command])
    return "\n".join(["#!/usr/bin/env bash", *(f"#SBATCH {_quoted(text)}" for text in options), f"exec {on_nodes}\n"])


def submit(file: Path) -> str:
    """Hand a batch file to SLURM and return the job's number. Raises ConfigError if SLURM is not there or refuses."""
    if shutil.which("sbatch") is None:
        raise ConfigError(f"--submit needs sbatch on PATH; {file} is written: submit it where SLURM is")
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch refused {file}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().split(";")[0]


def _quoted(option: str) -> str:
    """Return an option as a #SBATCH line can carry it: sbatch knows double quotes there, and no other."""
    return f'"{option}"' if " " in option else option
