"""`train`, or `run.py`: starts the worker processes of a run after checking everything."""

from __future__ import annotations

import argparse
import shlex
import sys

from llava_mcore.cli.base.entry import command_main
from llava_mcore.config.flags import CommandLine, make_parser
from llava_mcore.config.load import run_config_yaml
from llava_mcore.config.schema import RunConfig
from llava_mcore.launch.forecast import memory_warning
from llava_mcore.launch.jobs.arguments import job_arguments
from llava_mcore.launch.jobs.job import prepare_cluster_job, prepare_job, submit, write
from llava_mcore.launch.singularity import inner_command, rerun_in_container
from llava_mcore.launch.start import prepare, start


def parser() -> argparse.ArgumentParser:
    """Flags of a run: those beside the fields of the configuration."""
    return make_parser("python -m llava_mcore train", "Train a vision-language model.", dry_run=True)


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code: 0, 2 for an error found before the start, else that of the workers."""
    command_line = CommandLine.of(args)
    config = command_line.load()
    if config.launch.k8s is not None or config.launch.vertex is not None:
        return _write_job(config, command_line)
    if command_line.submit:
        return _submit(config, command_line)
    if config.launch.sif_path is not None:
        command = inner_command("train", command_line.arguments)
        return rerun_in_container(config.launch.sif_path, command, dry_run=command_line.dry_run)
    launch = prepare(config, command_line.typed)
    warning = memory_warning(launch.run, launch.run.launch.num_gpus * launch.nodes.count, launch.gpu_count)
    if warning is not None and launch.nodes.rank == 0:
        print(f"warning: {warning}", file=sys.stderr)
    if command_line.dry_run:
        if config.checkpoint.unsaved is not None:
            print(f"note: {config.checkpoint.unsaved}", file=sys.stderr)
        print(f"# {launch.config_file}\n{run_config_yaml(launch.run)}\n# command\n{shlex.join(launch.command)}")
        if launch.completion is not None:
            print(launch.completion, file=sys.stderr)
        print(f"{launch.layout}\nnothing was started, and nothing was written", file=sys.stderr)
        return 0
    return start(launch, command_line.notices)


def _submit(config: RunConfig, command_line: CommandLine) -> int:
    """Write SAVE_DIR/NAME/train.sbatch and submit it, unless the run is complete; with --dry-run, print it."""
    passed_on = [text for text in command_line.arguments if text not in ("--submit", "--dry-run")]
    job = prepare_job(config, passed_on, command_line.typed)
    for note in job.notes:
        print(f"note: {note}", file=sys.stderr)
    if command_line.dry_run:
        print(f"# {job.file}\n{job.text}", end="")
    if job.completion is not None:
        print(f"{job.completion}\nno job was submitted", file=sys.stderr if command_line.dry_run else sys.stdout)
    elif not command_line.dry_run:
        print(f"submitted {job.file} as SLURM job {submit(job)}")
    return 0


def _write_job(config: RunConfig, command_line: CommandLine) -> int:
    """Write a job's file for Kubernetes or Vertex AI, and create the job with --submit; with --dry-run, print it."""
    job = prepare_cluster_job(config, job_arguments(command_line), command_line.typed)
    for note in job.notes:
        print(f"note: {note}", file=sys.stderr)
    if command_line.dry_run:
        print(f"# {job.file}\n{job.text}", end="")
    elif command_line.submit:
        print(submit(job))
    else:
        write(job)
        print(f"wrote {job.file}; start it with: {shlex.join(job.command or ())}")
    return 0


main = command_main(parser, run, warns_of_versions=False)
