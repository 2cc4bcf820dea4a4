"""Seconds that each command takes to print its help, to read its first file, and to import everything that it needs.

    python -m benchmarks.startup

Every run is a new process; each figure is the median of several runs. CPU seconds count user and system time of the
process; on a shared machine they vary less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.record import show, write_record
from benchmarks.startup_child import RESULT
from llava_mcore.cli.base.commands import COMMANDS

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*(ROOT / "scripts").rglob("*.py"), *(ROOT / "examples").glob("*/run.py")])
SHOWN = ("torch", "transformers", "megatron", "torchvision", "pyarrow", "matplotlib", "pandas", "scipy", "wandb")


@dataclass(frozen=True)
class Start:
    """One process: seconds until the moment that was waited for, and the top-level modules that it had imported."""

    wall: float
    cpu: float
    modules: frozenset[str]


def start(command: Sequence[str], watched: Path | None = None) -> Start:
    """Run a command in a new process, to its end or until it opens a file in `watched`."""
    child = [sys.executable, "-W", "ignore", "-m", "benchmarks.startup_child"]
    given = [repr(time.time()), str(watched or ""), *command]
    # Compiled modules belong to the measurement's preparation, so they are kept.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [*child, *given], capture_output=True, text=True, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found = json.loads(lines[0].removeprefix(RESULT))
    return Start(found["wall"], found["cpu"], frozenset(found["modules"]))


def helps() -> dict[str, list[str]]:
    """Return every command and script with --help, by name."""
    commands = {f"{name} --help": ["-m", "llava_mcore", name, "--help"] for name in COMMANDS}
    return commands | {f"{x.relative_to(ROOT)} --help": [str(x), "--help"] for x in SCRIPTS}


def write_folders(folder: Path) -> dict[str, tuple[list[str], Path]]:
    """Write a Hugging Face folder of no known model and a checkpoint without weights; return commands that read them.

    The commands import everything that they need for a conversion, then end with a message about the folder.

    Returns:
        For each name the command, and the folder that it reads first.
    """
    hf, checkpoints = folder / "hf", folder / "megatron"
    (checkpoints / "iter_0000000").mkdir(parents=True)
    (checkpoints / "iter_0000000" / "metadata.json").write_text("{}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("0\n")
    hf.mkdir()
    (hf / "config.json").write_text('{"model_type": "none"}')
    save_file({"x": np.zeros(1, np.float32)}, hf / "model.safetensors")
    module = ["-m", "llava_mcore"]
    return {
        "import-hf": ([*module, "import-hf", "--hf-dir", str(hf), "--megatron-dir", str(folder / "new")], hf),
        "export-hf": (
            [*module, "export-hf", "--megatron-dir", str(checkpoints), "--hf-dir", str(folder / "new")],
            checkpoints,
        ),
        "check --hf-dir": ([*module, "check", "--hf-dir", str(hf)], hf),
        "check --megatron-dir": ([*module, "check", "--megatron-dir", str(checkpoints)], checkpoints),
    }


def rows(folder: Path) -> Iterator[tuple[str, list[str], Path | None]]:
    """Yield what is measured: its name, the command, and the folder whose first read ends it."""
    for name, command in helps().items():
        yield name, command, None
    for name, (command, watched) in write_folders(folder).items():
        yield f"{name}: first read", command, watched
        yield f"{name}: all imports", command, None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="processes per row (default 5)")
    parser.add_argument("--only", default="", help="measure rows whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        chosen = [row for row in rows(Path(temporary)) if options.only in row[0]]
        for name, command, watched in chosen:
            start(command, watched)  # compiles what has never been imported
            runs = [start(command, watched) for _ in range(options.runs)]
            wall, cpu = (statistics.median(values) for values in ([x.wall for x in runs], [x.cpu for x in runs]))
            imported = ", ".join(x for x in SHOWN if x in runs[0].modules)
            found.append({"command": name, "wall s": f"{wall:.2f}", "CPU s": f"{cpu:.2f}", "imported": imported or "-"})
    show(found)
    if options.json is not None:
        write_record(options.json, found, gpus=0)


if __name__ == "__main__":
    main()
