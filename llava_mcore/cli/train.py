"""`run.py`: starts the worker processes of a run after checking everything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from llava_mcore.config.flags import CommandLine, parse_command_line
from llava_mcore.config.load import run_config_yaml
from llava_mcore.config.schema import RunConfig
from llava_mcore.launch.singularity import inner_command, rerun_in_container
from llava_mcore.launch.start import prepare, prepare_job, start, submit
from llava_mcore.processes.messages import with_messages


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit code: 0, 2 for an error found before the start, else that of the workers."""
    return with_messages(lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _run(arguments: list[str]) -> int:
    command_line = parse_command_line(arguments, "run.py")
    run = command_line.load()
    if command_line.submit:
        return _submit(run, arguments, command_line)
    if run.launch.sif_path is not None:
        command = inner_command("train", arguments)
        return rerun_in_container(run.launch.sif_path, command, dry_run=command_line.dry_run)
    launch = prepare(run, command_line.typed)
    if command_line.dry_run:
        if run.checkpoint.unsaved is not None:
            print(f"note: {run.checkpoint.unsaved}", file=sys.stderr)
        print(f"# {launch.config_file}\n{run_config_yaml(launch.run)}\n# command\n{shlex.join(launch.command)}")
        return 0
    return start(launch, command_line.notices)


def _submit(run: RunConfig, arguments: Sequence[str], command_line: CommandLine) -> int:
    """Write SAVE_DIR/NAME/train.sbatch and submit it; with --dry-run, print it."""
    passed_on = [text for text in arguments if text not in ("--submit", "--dry-run")]
    job = prepare_job(run, passed_on, command_line.typed)
    for note in job.notes:
        print(f"note: {note}", file=sys.stderr)
    if command_line.dry_run:
        print(f"# {job.file}\n{job.text}", end="")
    else:
        print(f"submitted {job.file} as SLURM job {submit(job)}")
    return 0
