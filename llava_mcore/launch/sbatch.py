"""The batch file of a run: written next to its outputs and submitted to SLURM."""

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
from llava_mcore.launch.checkout import REPOSITORY, require_checkout

FILE = "train.sbatch"
SECONDS_BEFORE_LIMIT = 300
"""Seconds before its time limit at which a job is asked to save and end."""
_CPUS = ("--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive")
_MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
"""Options that replace ours. Without any, many clusters give a task one CPU and a small part of the memory."""
RESOURCES = (
    "unless --sbatch-options ask for others, the job asks on every node for a CPU per process and loader process "
    "(--cpus-per-task) and for all memory (--mem=0): --sbatch-options='--cpus-per-task=N --mem=SIZE'"
)
_UNQUOTABLE = re.compile(r"[\"'\\#\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that sbatch interprets in a #SBATCH line: quotes, escapes, comments, the end of the line."""


def batch_file(
    name: str, launch: LaunchConfig, run_dir: Path, arguments: Sequence[str], *, on_gpus: bool, cpus: int
) -> str:
    """Return the text of a batch file that runs `run.py arguments` on each node, from the folder it was submitted in.

    Args:
        arguments: the command line without --submit.
        on_gpus: whether to ask for `num_gpus` GPUs per node.
        cpus: CPUs to ask for per node, unless --sbatch-options asks for some.

    Raises:
        ConfigError: lists every value that a #SBATCH line cannot carry; or the package is not a checkout.
    """
    require_checkout("--submit")
    try:
        further = shlex.split(launch.sbatch_options or "")
    except ValueError as error:
        raise ConfigError(f"--sbatch-options {launch.sbatch_options}: an unclosed quote") from error
    output = launch.slurm_output_name or str(run_dir).replace("%", "%%") + "/slurm-%j.out"  # %j: the job's id
    options = [
        f"--job-name={name}",
        f"--nodes={launch.num_nodes or 1}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={launch.num_gpus}"] if on_gpus else []),
        *([] if _asks_for(further, _CPUS) else [f"--cpus-per-task={cpus}"]),
        *([] if _asks_for(further, _MEMORY) else ["--mem=0"]),
        f"--output={output}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SECONDS_BEFORE_LIMIT}",
        *further,
    ]
    errors = [
        f"{option!r}: {match[0]!r} is not allowed there; choose a name, a folder or an option without it"
        for option in options
        if (match := _UNQUOTABLE.search(option))
    ]
    if errors:
        raise ConfigError(problems("The job's #SBATCH lines cannot be written", errors))
    command = [sys.executable, str(REPOSITORY / "scripts" / "train" / "run.py"), *arguments]
    on_nodes = shlex.join(["bash", str(REPOSITORY / "scripts" / "slurm" / "on_each_node.sh"), *command])
    return "\n".join(["#!/usr/bin/env bash", *(f"#SBATCH {_quoted(text)}" for text in options), f"exec {on_nodes}\n"])


def _asks_for(options: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether one of some options is given, as --name, --name=value or -c4."""
    return any(text.split("=")[0] in names or (text[:2] in names and text[:2] != "--") for text in options)


def submit(file: Path) -> str:
    """Submit a batch file to SLURM and return the job's id. Raises ConfigError if SLURM is missing or refuses."""
    if shutil.which("sbatch") is None:
        raise ConfigError(f"--submit needs sbatch on PATH; {file} was written: submit it on a machine with SLURM")
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch refused {file}: {done.stderr.strip() or done.stdout.strip()}\n{RESOURCES}")
    return done.stdout.strip().split(";")[0]


def _quoted(option: str) -> str:
    """Return an option quoted for a #SBATCH line, in which sbatch supports double quotes only."""
    return f'"{option}"' if " " in option else option
