"""The batch file of a run: written beside its outputs and handed to SLURM."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llava_mcore.config.sections.launch import LaunchConfig
from llava_mcore.errors import ConfigError, problems
from llava_mcore.launch.singularity import REPOSITORY

FILE = "train.sbatch"
SECONDS_BEFORE_LIMIT = 300
"""How long before its time limit a job is asked to save and end."""
_UNQUOTABLE = re.compile(r"[\"'\\#\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""What sbatch's own reading of a #SBATCH line makes something else of: quotes, escapes, comments, the line's end."""


def batch_file(name: str, launch: LaunchConfig, run_dir: Path, arguments: Sequence[str], *, on_gpus: bool) -> str:
    """Return the text of a batch file that runs `run.py arguments` on each node, from the folder it was submitted in.

    Args:
        arguments: the command line without --submit.
        on_gpus: whether to ask for `num_gpus` GPUs a node.

    Raises:
        ConfigError: lists every value that a #SBATCH line cannot carry.
    """
    try:
        further = shlex.split(launch.sbatch_options or "")
    except ValueError as error:
        raise ConfigError(f"--sbatch-options {launch.sbatch_options}: a quote is open at its end") from error
    output = launch.slurm_output_name or str(run_dir).replace("%", "%%") + "/slurm-%j.out"  # %j: the job's number
    options = [
        f"--job-name={name}",
        f"--nodes={launch.num_nodes or 1}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={launch.num_gpus}"] if on_gpus else []),
        f"--output={output}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SECONDS_BEFORE_LIMIT}",
        *further,
    ]
    found = [
        f"{option!r}: {match[0]!r} cannot be written there; choose a name, a folder or an option without it"
        for option in options
        if (match := _UNQUOTABLE.search(option))
    ]
    if found:
        raise ConfigError(problems("The job's #SBATCH lines cannot be written", found))
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
