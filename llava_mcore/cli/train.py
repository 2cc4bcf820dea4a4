"""`run.py`: from flags to running worker processes. Nothing is started before everything has been checked."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.config.flags import CommandLine, parse_command_line
from llava_mcore.config.load import run_config_yaml, save_run_config
from llava_mcore.config.rules.all_rules import check_devices, check_run
from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.rules.schedule import check_schedule
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError, LlavaMcoreError, os_error_text, problems
from llava_mcore.files.text_files import naming
from llava_mcore.launch.nodes import check_gpu_ids, check_interface, find_nodes
from llava_mcore.launch.process import run_child
from llava_mcore.launch.sbatch import FILE as BATCH_FILE
from llava_mcore.launch.sbatch import batch_file, submit
from llava_mcore.launch.singularity import inner_command, rerun_in_container
from llava_mcore.launch.slurm import describe, read_job
from llava_mcore.launch.torchrun_command import torchrun_argv, worker_env
from llava_mcore.run.messages import with_messages
from llava_mcore.run.run_lock import RunLock
from llava_mcore.templates.named import absolute_choice, check_choice

if TYPE_CHECKING:
    from llava_mcore.checkpoint.choose_start import StartPoint

WORKER = "llava_mcore.run.worker"
_FOLDERS = ("load", "hf_dir", "save_dir", "non_persistent_dir", "non_persistent_local_dir")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit code: 0, 2 for a mistake found before the start, else that of the workers."""
    return with_messages(lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _run(arguments: list[str]) -> int:
    command_line = parse_command_line(arguments, "run.py")
    run = command_line.load()
    if command_line.submit:
        return _submit(run, arguments, command_line)
    if run.launch.sif_path is not None:
        command = inner_command("train", arguments)
        return rerun_in_container(run.launch.sif_path, command, dry_run=command_line.dry_run)
    return _launch(run, command_line)


def resolve(run: RunConfig, gpu_count: int) -> tuple[RunConfig, int]:
    """Return the run with everything decided that the machine decides, and the number of processes.

    Paths become absolute, so that the stored configuration means the same from everywhere.
    """
    gpus = run.launch.num_gpus
    per_node = gpus if gpus > 0 else len(run.launch.chosen_gpus) or max(1, gpu_count)
    num_nodes = run.launch.num_nodes or 1
    changes = {
        "parallel": {"backend": run.parallel.backend or ("nccl" if gpu_count else "gloo")},
        "training": {"precision": run.training.precision or ("bf16" if gpu_count else "fp32")},
        "launch": {"num_gpus": per_node, "num_nodes": num_nodes},
        "checkpoint": {name: _absolute(getattr(run.checkpoint, name)) for name in _FOLDERS},
        "data": {"path": _absolute(run.data.path), "chat_template": absolute_choice(run.data.chat_template)},
    }
    sections = {name: getattr(run, name).model_copy(update=change) for name, change in changes.items()}
    return run.model_copy(update=sections), per_node * num_nodes


def preflight(run: RunConfig, world_size: int, gpu_count: int, typed: Collection[str] = ()) -> list[str]:
    """Return everything that keeps a resolved run from starting. `typed`: the keys that flags set (`check_needs`)."""
    # These bring in transformers and energon: --help and a mistyped flag need not wait for them.
    from llava_mcore.checkpoint.choose_start import resumes, start_point
    from llava_mcore.data.storage.dataset_path import VALIDATION, check_dataset
    from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims

    found: list[str] = check_devices(run.launch.num_gpus, gpu_count)
    if run.logging.mlflow and importlib.util.find_spec("mlflow") is None:
        found.append("--mlflow needs the package mlflow-skinny: pip install 'llava-mcore[mlflow]'")
    found += [*check_gpu_ids(run.launch, gpu_count), *check_interface(run.launch)]
    dims: ModelDims | None = None
    source = ""
    with collecting(found):
        start = start_point(run)
        source = str(start.hf_dir)
        if resumes(run, start) and not [*check_schedule(run.training, run.optimizer)]:
            found += _too_far(run, start)
        dims = model_dims(load_hf_config(start.hf_dir))
    with collecting(found):
        check_dataset(run.data.path)
        if run.validation.eval_interval is not None:
            check_dataset(run.data.path, VALIDATION)
    with collecting(found):
        check_choice(run.data.chat_template)
    return found + check_run(run, dims, world_size, gpu_count > 0, source, typed)


@contextlib.contextmanager
def collecting(found: list[str]) -> Iterator[None]:
    """Add what goes wrong within to a list of problems."""
    try:
        yield
    except LlavaMcoreError as error:
        found.append(str(error))
    except OSError as error:
        found.append(os_error_text(error))


def _too_far(run: RunConfig, start: StartPoint) -> list[str]:
    """Return what is wrong with resuming a run that has reached its end: nothing would be trained or saved."""
    number = run.training.num_iterations
    if start.iteration < number:
        return []
    reached = f"{start.checkpoint} has reached iteration {start.iteration} of {number}"
    more = "raise --train-iters or --train-samples, which count the whole run, to go on"
    if start.kind == "load":
        more += "; or leave --load-optim away this first time, to begin a new run with its weights"
    return [f"{reached}: {more}"]


def _launch(typed: RunConfig, command_line: CommandLine) -> int:
    """Check the run, write SAVE_DIR/NAME/run.yaml and start this machine's workers."""
    gpu_count = _count_gpus()
    nodes = find_nodes(typed.launch, os.environ)
    launch = typed.launch.model_copy(update={"num_nodes": nodes.count, "node_rank": None})  # the same on all nodes
    run, world_size = resolve(typed.model_copy(update={"launch": launch}), gpu_count)
    found = [*preflight(run, world_size, gpu_count, command_line.typed), *_without_submit(command_line)]
    if found:
        raise ConfigError(problems("The run cannot start", found))
    config_file = run.run_dir / "run.yaml"
    command = torchrun_argv(run.launch.num_gpus, WORKER, ["--config", str(config_file)], nodes)
    if command_line.dry_run:
        print(f"# {config_file}\n{run_config_yaml(run)}\n# command\n{shlex.join(command)}")
        return 0
    environment = worker_env(
        os.environ,
        run.launch.num_gpus,
        cpu_cores=len(os.sched_getaffinity(0)),
        device_available=gpu_count > 0,
        interface=run.launch.interface,
        gpu_ids=run.launch.chosen_gpus,
    )
    with RunLock(run, nodes).hold():
        with naming(config_file):
            save_run_config(run, config_file)
        for notice in command_line.notices:
            print(notice, flush=True)
        job = read_job(os.environ)
        if job is not None and nodes.rank == 0:
            print(describe(job), flush=True)
        return run_child(command, environment, ours="torchrun, which starts and ends all ranks,")


def _without_submit(command_line: CommandLine) -> list[str]:
    """Return flags that only say how to submit a job. The job itself is started with the same flags."""
    if read_job(os.environ) is not None:
        return []
    flags = {"launch.sbatch_options": "--sbatch-options", "launch.slurm_output_name": "--slurm-output-name"}
    return [
        f"{flag} has no effect without --submit: add it, or leave {flag} away"
        for key, flag in flags.items()
        if key in command_line.typed
    ]


def _submit(typed: RunConfig, arguments: Sequence[str], command_line: CommandLine) -> int:
    """Check what can be checked without the nodes, write SAVE_DIR/NAME/train.sbatch and submit it."""
    on_gpus = typed.parallel.backend != "gloo"
    gpus = typed.launch.num_gpus
    if gpus < 0:
        raise ConfigError("--submit needs the number of GPUs of a node (with --backend gloo: of processes): give -g")
    run, world_size = resolve(typed, gpus if on_gpus else 0)
    inside = typed.launch.sif_path is not None  # this machine may hold neither libraries nor models
    if inside:
        found = check_run(run, None, world_size, on_gpus, typed=command_line.typed)
    else:
        found = preflight(run, world_size, gpus if on_gpus else 0, command_line.typed)
    if found:
        raise ConfigError(problems("The run cannot start", found))
    kept = [text for text in arguments if text not in ("--submit", "--dry-run")]
    text = batch_file(run.name, run.launch, run.run_dir, kept, on_gpus=on_gpus)
    file = run.run_dir / BATCH_FILE
    if command_line.dry_run:
        print(f"# {file}\n{text}", end="")
        return 0
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with naming(file):
        file.write_text(text, encoding="utf-8")
    print(f"submitted {file} as SLURM job {submit(file)}")
    return 0


def _count_gpus() -> int:
    """Return the number of GPUs without starting CUDA in this process, which would hold memory on one."""
    import torch

    return torch.cuda.device_count()


def _absolute[T](path: T | None) -> T | Path | None:
    """Return an absolute path; URLs are left as they are."""
    return path.absolute() if isinstance(path, Path) else path
