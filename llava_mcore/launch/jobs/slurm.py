"""SLURM: facts about the current job, and the batch file that submits one.

Needs only the standard library and, for names and times, `scontrol`.
"""

from __future__ import annotations

import datetime
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.errors import ConfigError, problems
from llava_mcore.launch.checkout import REPOSITORY, require_checkout

if TYPE_CHECKING:
    from llava_mcore.config.sections.launch import LaunchConfig


FIRST_PORT = 20000
"""Base of the rendezvous port: jobs that share a node use different ports, this one plus the job's id modulo 10000."""
WITHOUT_PROCESSES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States of a job without running processes. COMPLETING is not one of them."""
BATCH_FILE = "train.sbatch"
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


@dataclass(frozen=True)
class SlurmJob:
    """The job that this process is part of.

    Attributes:
        num_nodes: nodes that run this command: those of the job step, or 1 outside `srun`.
        num_tasks: how often the command was started over all nodes.
        job_nodes: nodes of the whole job.
        node_list: the job's nodes as SLURM writes them, such as `node[1-2]`.
        restart_count: how often the job was requeued.
    """

    job_id: str
    num_nodes: int
    num_tasks: int
    node_rank: int
    job_nodes: int
    node_list: str
    restart_count: int

    @property
    def port(self) -> int:
        """Return the job's default rendezvous port."""
        return default_port(self.job_id)


def read_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """Return the job that the environment describes, or None outside SLURM."""
    job_id = environ.get("SLURM_JOB_ID")
    if job_id is None:
        return None
    in_step = "SLURM_STEP_ID" in environ  # a batch script itself has SLURM_NODEID too, but runs on one node only
    return SlurmJob(
        job_id=job_id,
        num_nodes=int(environ.get("SLURM_STEP_NUM_NODES", "1")) if in_step else 1,
        num_tasks=int(environ.get("SLURM_STEP_NUM_TASKS", "1")) if in_step else 1,
        node_rank=int(environ.get("SLURM_NODEID", "0")) if in_step else 0,
        job_nodes=int(environ.get("SLURM_JOB_NUM_NODES", "1")),
        node_list=environ.get("SLURM_STEP_NODELIST", "") if in_step else environ.get("SLURM_JOB_NODELIST", ""),
        restart_count=int(environ.get("SLURM_RESTART_COUNT", "0")),
    )


def default_port(job_id: str) -> int:
    """Return a port that two jobs on one node do not share. Array jobs are numbered `12_3`: digits count."""
    digits = "".join(character for character in job_id if character.isdigit())
    return FIRST_PORT + int(digits or "0") % 10000


def first_address(job: SlurmJob) -> str:
    """Return the address of the job's first node: its name, or the address that SLURM knows if the name does not
    resolve.

    Raises ConfigError if `scontrol` is missing, as inside most container images.
    """
    name = _scontrol("show", "hostnames", job.node_list).split()[0]
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return _field(_scontrol("show", "node", "-o", name), "NodeAddr") or name
    return name


def end_time(job: SlurmJob) -> datetime.datetime | None:
    """Return the local time at which the job reaches its time limit; None without a limit or without `scontrol`."""
    if shutil.which("scontrol") is None:
        return None
    text = _field(_scontrol("show", "job", "-o", job.job_id), "EndTime") or ""
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:  # Unknown, or NONE
        return None


def job_has_ended(job_id: str) -> bool | None:
    """Return whether no process of a job is running; None if SLURM does not know, or is missing."""
    if shutil.which("scontrol") is None:
        return None
    done = subprocess.run(["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True, check=False)
    if done.returncode:
        return True if "Invalid job id" in done.stderr else None  # it forgets a job minutes after its end
    state = _field(done.stdout, "JobState")
    return None if state is None else state in WITHOUT_PROCESSES


def address_override(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return `launch.master_addr=…` for the same command inside an image, which has no `scontrol` to ask.

    Returns [] outside a job step on several nodes, or if the command line gives the address.
    """
    job = read_job(environ)
    if job is None or job.num_nodes == 1:
        return []
    names = ("-m", "--master-addr", "launch.master_addr")
    if any(text.split("=")[0] in names for text in arguments):
        return []
    return [f"launch.master_addr={first_address(job)}"]


def describe(job: SlurmJob) -> str:
    """Return one line about the job: id, node, restarts and time limit."""
    text = f"SLURM job {job.job_id}, node {job.node_rank + 1} of {job.num_nodes}"
    if job.restart_count:
        text += f", requeued {job.restart_count} times"
    end = end_time(job)
    return text if end is None else f"{text}, time limit at {end:%Y-%m-%d %H:%M:%S}"


def _scontrol(*arguments: str) -> str:
    if shutil.which("scontrol") is None:
        raise ConfigError("scontrol is not on PATH, so the nodes of this SLURM job are unknown: give --master-addr")
    done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"scontrol {' '.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _field(line: str, name: str) -> str | None:
    """Return the value of `Name=value` in a line of scontrol's output."""
    words = [word for word in line.split() if word.startswith(f"{name}=")]
    return words[0].partition("=")[2] if words else None


def batch_file(
    name: str, launch: LaunchConfig, run_dir: Path, arguments: Sequence[str], *, on_gpus: bool, cpus: int
) -> str:
    """Return the text of a batch file that runs `train arguments` on each node, from the folder it was submitted in.

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
    # One task per node: `train` starts the ranks of its node. SLURM asks it to save some time before the limit.
    output = launch.slurm_output_name or str(run_dir).replace("%", "%%") + "/slurm-%j.out"  # %j: the job's id
    options = [
        f"--job-name={name}",
        f"--nodes={launch.num_nodes or 1}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={launch.num_gpus}"] if on_gpus else []),
        f"--output={output}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SECONDS_BEFORE_LIMIT}",
        *([] if _asks_for(further, _CPUS) else [f"--cpus-per-task={cpus}"]),
        *([] if _asks_for(further, _MEMORY) else ["--mem=0"]),
        *further,
    ]
    # sbatch parses these lines by its own rules, not the shell's.
    errors = [
        f"{option!r}: {match[0]!r} is not allowed there; choose a name, a folder or an option without it"
        for option in options
        if (match := _UNQUOTABLE.search(option))
    ]
    if errors:
        raise ConfigError(problems("The job's #SBATCH lines cannot be written", errors))
    # Each node runs the same command line, through a script that passes the signal on and requeues the job.
    command = [sys.executable, str(REPOSITORY / "scripts" / "train" / "run.py"), *arguments]
    on_nodes = shlex.join(["bash", str(REPOSITORY / "scripts" / "slurm" / "on_each_node.sh"), *command])
    return "\n".join(["#!/usr/bin/env bash", *(f"#SBATCH {_quoted(text)}" for text in options), f"exec {on_nodes}\n"])


def _asks_for(options: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether any of these options is given, as --name, --name=value or -c4."""
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
