"""Run the project's commands as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def command(script: str, *arguments: object) -> list[str]:
    """Return the command line of one of our scripts."""
    return [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]


def run(
    script: str, *arguments: object, expect: int = 0, timeout: float = 900, env: dict[str, str] | None = None
) -> str:
    """Run one of our scripts and return everything it printed."""
    done = subprocess.run(
        command(script, *arguments), capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False, env=env
    )
    text = done.stdout + done.stderr
    assert done.returncode == expect, f"exit code {done.returncode}\n{text[-6000:]}"
    return text


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl, complete lines only."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_and_kill(run_dir: Path, iteration: int, script: str, *arguments: object, timeout: float = 900) -> None:
    """Start a script and kill it with all its workers (-9) as soon as metrics.jsonl shows an iteration."""
    process = subprocess.Popen(
        command(script, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
    )
    end = time.monotonic() + timeout
    try:
        while not any(m["iteration"] >= iteration for m in read_metrics(run_dir)):
            assert process.poll() is None, process.stdout.read().decode()[-6000:] if process.stdout else ""
            assert time.monotonic() < end, "the run did not get there in time"
            time.sleep(0.02)
    finally:
        kill_tree(process.pid)
        process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and everything below it, also what has started sessions of its own."""
    import psutil

    if not psutil.pid_exists(pid):
        return
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)
