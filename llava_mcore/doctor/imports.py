"""Imports packages in another process: one that is broken may end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llava_mcore.doctor.probe import MARK
from llava_mcore.doctor.requirements import CHECKOUT

SECONDS = 300
"""Limit of all imports together; a network file system may be slow."""


@dataclass
class Imported:
    """errors: why a module cannot be imported. torch: what torch knows of the machine; None: it cannot be imported."""

    errors: dict[str, str] = field(default_factory=dict)
    torch: Mapping[str, Any] | None = None


def import_all(modules: Sequence[str], seconds: float = SECONDS) -> Imported:
    """Import modules in one process, and the rest in another one whenever one of them ends it."""
    result, remaining = Imported(), list(modules)
    while remaining:
        lines, reason = _run([sys.executable, "-m", "llava_mcore.doctor.probe", *remaining], seconds)
        for facts in lines:
            remaining.remove(facts["module"])
            if facts["module"] == "torch":
                result.torch = facts
        if remaining:
            result.errors[remaining.pop(0)] = reason
    return result


def _run(command: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of a probe, and how it ended."""
    text, errors, reason = run_limited(command, seconds)
    lines = [json.loads(line.removeprefix(MARK)) for line in text.splitlines() if line.startswith(MARK)]
    return lines, reason or last_line(errors)


def run_limited(command: Sequence[str], seconds: float) -> tuple[str, str, str | None]:
    """Run a command; return stdout, stderr and why it was ended: by a signal or by the limit; else None."""
    process = subprocess.Popen(
        command,
        env=child_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reason = None
    try:
        text, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        reason = f"it has not ended after {seconds:.0f} seconds"
    finally:
        if process.poll() is None:  # also if we are interrupted; with the processes that it has started
            os.killpg(process.pid, signal.SIGKILL)
    if reason is not None:
        text, errors = process.communicate()
    elif process.returncode < 0:
        reason = f"the process was ended by {signal.Signals(-process.returncode).name}"
    return text, errors, reason


def child_env() -> dict[str, str]:
    """Return our environment with the package on PYTHONPATH, so that a checkout works from every folder."""
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def last_line(text: str) -> str:
    """Return the last line that says something, as of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
