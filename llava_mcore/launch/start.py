"""Starts the workers of a run after checking everything."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.config.load import as_run_config, load_run_config, save_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError, LlavaMcoreError, problems
from llava_mcore.files.regular import naming
from llava_mcore.launch.cluster_env import checkpoint_folder
from llava_mcore.launch.ending import last_lines
from llava_mcore.launch.forecast import completed
from llava_mcore.launch.jobs.slurm import describe, read_job
from llava_mcore.launch.nodes import Nodes, find_nodes
from llava_mcore.launch.preflight import collecting, completion, preflight, resolve
from llava_mcore.launch.run_lock import RunLock
from llava_mcore.launch.torchrun_command import torchrun_argv, worker_env
from llava_mcore.processes.control import run_child

WORKER = "llava_mcore.launch.worker"


def train(config: RunConfig | Mapping[str, Any] | Path | str) -> int:
    """Train like `python -m llava_mcore train`, in separate processes; return their exit code when they end.

    Call it in the main thread: signals are forwarded to the workers.

    Examples:
        >>> train({"name": "first", "data": {"path": "shards"}, "checkpoint": {"load": "megatron", "save_dir": "runs"}})
        0

    Args:
        config: a configuration, its sections and keys as in a configuration file, or such a file (YAML or JSON).

    Returns:
        0 at the end of the run, also if it was already complete, 75 if it was asked to stop early, 128 + n if signal n
        ended it, else an error's code.

    Raises:
        ConfigError: the run cannot start; lists why. Nothing was started.
        FolderInUse: another run uses its folders.
    """
    run = as_run_config(config)
    if run.launch.sif_path is not None:
        raise ConfigError("launch.sif_path: only the command enters an image; run this program inside it instead")
    if run.launch.k8s is not None or run.launch.vertex is not None:
        raise ConfigError("launch.k8s, launch.vertex: only the command writes a job's file; omit the key")
    return start(prepare(run))


@dataclass(frozen=True)
class Launch:
    """A checked run and this machine's part of it: `command` starts the workers, which read `config_file`.

    completion: a message if all iterations are already done; else None. tower: a line about the vision tower, if its
    division was chosen here.
    """

    run: RunConfig
    nodes: Nodes
    config_file: Path
    command: list[str]
    gpu_count: int
    completion: str | None = None
    tower: str | None = None

    @property
    def layout(self) -> str:
        """Its processes and what each machine's are, such as "2 x 8 processes = tp 4 x pp 2 x dp 2; …"."""
        parallel, training, per_node = self.run.parallel, self.run.training, self.run.launch.num_gpus
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        dp = self.nodes.count * per_node // parallel.replica_size
        cp = f" x cp {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
        micro_batches = training.global_batch_size // (training.micro_batch_size * dp)
        first = self.nodes.rank * per_node
        return (
            f"{self.nodes.count} x {per_node} processes = tp {tp}{cp} x pp {pp} x dp {dp}; "
            f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} per iteration; "
            f"node {self.nodes.rank}: ranks {first} to {first + per_node - 1}{self._length}{self._tower}"
        )

    @property
    def _tower(self) -> str:
        """The line about the tower, and whether the run had another choice before; else nothing."""
        if self.tower is None:
            return ""
        before = _towers_before(self.config_file)
        is_other = before is not None and before != self.run.parallel.vision_data_parallel
        return f"\n{self.tower}" + (f"; it was {before} before: a size, the data or the GPU has changed" * is_other)

    @property
    def _length(self) -> str:
        """The length of a run by epochs, on a line of its own; else nothing."""
        training = self.run.training
        if training.samples_to_read is None:
            return ""
        limit = "at most " if self.run.data.packing else ""
        epochs = "1 epoch" if training.train_epochs == 1 else f"{training.train_epochs:g} epochs"
        return (
            f"\n{epochs} of {training.epoch_samples:,} samples = "
            f"{training.samples_to_read:,} samples: {limit}{training.num_iterations:,} iterations"
        )


def prepare(typed: RunConfig, keys: Collection[str] = ()) -> Launch:
    """Check a run on this machine; nothing is written.

    Args:
        keys: keys set by flags, for messages about flags without effect.

    Raises:
        ConfigError: lists everything that prevents the run from starting.
    """
    gpu_count = _count_gpus()
    nodes = find_nodes(typed.launch, os.environ)
    typed = with_save_dir(typed, os.environ)
    launch = typed.launch.model_copy(update={"num_nodes": nodes.count, "node_rank": None})  # the same on all nodes
    run, world_size = resolve(typed.model_copy(update={"launch": launch}), gpu_count)
    errors: list[str] = []
    tower = None
    with collecting(errors):
        chosen = completed(run, world_size, gpu_count)
        run, tower = chosen.run, chosen.words
    others = preflight(run, world_size, gpu_count, keys)
    errors = [*others, *(error for error in errors if error not in others), *_without_submit(keys)]
    if errors:
        if run.checkpoint.save_dir is not None:
            RunLock(run, nodes).require_free()  # the files of a run in progress come and go
        raise ConfigError(problems("The run cannot start", errors))
    config_file = run.run_dir / "run.yaml"
    command = torchrun_argv(run.launch.num_gpus, WORKER, ["--config", str(config_file)], nodes)
    return Launch(run, nodes, config_file, command, gpu_count, completion(run), tower)


def with_save_dir(run: RunConfig, environ: Mapping[str, str]) -> RunConfig:
    """Return a run that saves where Vertex AI wants it, if no folder was given and it says so."""
    if run.checkpoint.save_dir is not None:
        return run
    folder = {"save_dir": checkpoint_folder(environ)}
    return run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update=folder)})


def start(launch: Launch, notices: Sequence[str] = ()) -> int:
    """Write SAVE_DIR/NAME/run.yaml, start this machine's workers, and return their exit code when they end.

    If all iterations are done already, nothing is written or started, and the run has succeeded: 0.

    Args:
        notices: lines to print first.

    Raises:
        FolderInUse: another run uses its folders.
        ConfigError: a folder cannot be written to; or, at the end, another run has taken it over.
    """
    run = launch.run
    if launch.completion is not None:
        for line in [launch.completion, *last_lines(run, 0, first_node=launch.nodes.rank == 0)]:
            print(line, flush=True)
        return 0
    # The environment of the workers, with defaults for what the user has not set.
    environment = worker_env(
        os.environ,
        run.launch.num_gpus,
        cpu_cores=len(os.sched_getaffinity(0)),
        device_available=launch.gpu_count > 0,
        interface=run.launch.interface,
        gpu_ids=run.launch.chosen_gpus,
    )
    # From here on no other run may use the folders. The workers read run.yaml.
    with RunLock(run, launch.nodes).hold():
        with naming(launch.config_file):
            save_run_config(run, launch.config_file)
        # Information for the user before the first iteration.
        for notice in notices:
            print(notice, flush=True)
        print(launch.layout, flush=True)
        if run.checkpoint.unsaved is not None and launch.nodes.rank == 0:
            print(f"note: {run.checkpoint.unsaved}", flush=True)
        job = read_job(os.environ)
        if job is not None and launch.nodes.rank == 0:
            print(describe(job), flush=True)
        processes = "1 process" if run.launch.num_gpus == 1 else f"{run.launch.num_gpus} processes"
        print(f"starting {processes}; imports take most of the time until the first iteration", flush=True)
        code = run_child(launch.command, environment, program="torchrun, which starts and stops all ranks,")
        for line in last_lines(run, code, first_node=launch.nodes.rank == 0):
            print(line, flush=True)
        return code


def _towers_before(config_file: Path) -> str | None:
    """Return the division of the tower at the run's last start; None if there was none, or it cannot be read."""
    if not config_file.is_file():
        return None
    try:
        return load_run_config(config_file).parallel.vision_data_parallel
    except LlavaMcoreError:  # another version's
        return None


def _without_submit(keys: Collection[str]) -> list[str]:
    """Return messages about flags that only affect how a job is submitted."""
    if read_job(os.environ) is not None:
        return []
    flags = {"launch.sbatch_options": "--sbatch-options", "launch.slurm_output_name": "--slurm-output-name"}
    return [
        f"{flag} has no effect without --submit: add it, or omit {flag}" for key, flag in flags.items() if key in keys
    ]


def _count_gpus() -> int:
    """Return the number of GPUs without starting CUDA in this process, which would use GPU memory."""
    import torch

    return torch.cuda.device_count()
