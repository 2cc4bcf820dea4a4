"""What the examples share: a folder for what they make, the project's commands as a user runs them, times."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
console = Console()


@dataclass
class Stages:
    """The stages of an example, with their times: `seconds` on the clock, `cpu_seconds` of all processes together."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, action: Callable[[], Any]) -> Any:
        """Run a stage under a headline and return its result."""
        console.rule(f"[bold]{len(self.seconds) + 1}. {name}")
        start, cpu_start = time.perf_counter(), cpu_seconds()
        result = action()
        self.seconds[name] = time.perf_counter() - start
        self.cpu_seconds[name] = cpu_seconds() - cpu_start
        return result


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def fresh_folder(out: Path, mark: str) -> Path:
    """Empty a folder of an earlier run, which has a file `mark`; never one that is something else."""
    if out.exists() and any(out.iterdir()):
        if not (out / mark).is_file():
            sys.exit(f"{out} holds something that this example did not make: choose another folder with --out")
        console.print(f"removing the earlier run in {out}")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / mark).touch()
    return out


def script(name: str, *flags: object) -> None:
    """Run one of the project's scripts as a user would; its failure ends the example."""
    command(f"scripts/{name}", *flags)


def command(*arguments: object) -> None:
    """Run python with these arguments in the project's folder; its failure ends the example."""
    texts = [str(x) for x in arguments]
    console.print(f"[dim]$ python {' '.join(texts)}[/dim]", soft_wrap=True, highlight=False)
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    code = subprocess.run([sys.executable, *texts], cwd=ROOT, env=env, check=False).returncode
    if code:
        sys.exit(f"{texts[0]} failed with exit code {code}; its message is above")


def progress_bar() -> Progress:
    """Return a progress bar with counts and time."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return what training logged, one dict per iteration."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def summary_table(
    title: str, stages: Stages, metrics: Sequence[Mapping[str, float]], scores: Mapping[str, float]
) -> Table:
    """Return the table at an example's end: the time of each stage, the loss of a run, and scores from 0 to 1."""
    table = Table(title=title)
    table.add_column("what", no_wrap=True)
    table.add_column("result", justify="right")
    for stage, value in stages.seconds.items():
        table.add_row(stage, f"{value:.1f} s")
    table.add_row("all stages", f"{sum(stages.seconds.values()):.1f} s")
    table.add_row("all stages, CPU time", f"{sum(stages.cpu_seconds.values()):.1f} s", end_section=True)
    table.add_row("loss, first iteration", f"{metrics[0]['loss']:.4f}")
    table.add_row(f"loss, last iteration ({int(metrics[-1]['iteration'])})", f"{metrics[-1]['loss']:.4f}")
    table.add_section()
    for name, share in scores.items():
        table.add_row(name, f"{share:.1%}")
    return table
