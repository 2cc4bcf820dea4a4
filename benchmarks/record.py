"""The files that benchmarks write with --json: rows, and what they were measured with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "transformer-engine", "megatron-energon", "transformers")
RESERVED = "reserved"
"""How the memory of runs is counted: what torch has reserved; in older files, what it has allocated."""
OPTIONAL_PACKAGES = ("flash-attn-4", "liger-kernel", "torchao")
"""Named where they are installed. The last two are those of the peers."""


def write_record(file: Path, rows: Sequence[dict[str, Any]], *, gpus: int, **more: str) -> None:
    """Write rows with the command, the devices, the versions and more; heading and notes are added by hand."""
    file.write_text(json.dumps({"about": about(gpus) | more, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def about(gpus: int) -> dict[str, Any]:
    """Return how a measurement was made."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix()
    return {"script": script, "gpu": f"{gpus} x {device}", "command": sys.argv[1:], "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of what is measured."""
    found = {}
    for name in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed as a package"
    return found


def show(rows: Sequence[dict[str, Any]], leave_out: Sequence[str] = ()) -> None:
    """Print rows as a table; a missing value is "-"."""
    columns = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in leave_out]
    table = Table(*columns)
    for row in rows:
        table.add_row(*[str(row.get(column, "-")) for column in columns])
    Console(width=180).print(table)
