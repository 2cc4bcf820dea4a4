"""Runs of run.py that benchmarks start: the command line, and the lines that they write."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from benchmarks.record import ROOT
from llava_mcore.processes.parent import tied_command

RECIPES = ("delayed", "tensorwise", "blockwise")
"""What --fp8-recipe takes."""
OVERRIDE = re.compile(r"\w+(\.\w+)+=")
"""How an override of a run's configuration begins. Such a word is never a value of an option before it."""
DISK_FULL = "No space left on device"
"""How the system says it."""


def parse_with_overrides(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line; `more` gets the key=value overrides, which may stand before, between or after options.

    Args:
        words: by default those of this process.
    """
    words = sys.argv[1:] if words is None else words
    parser.add_argument("more", nargs="*", help="key=value overrides of our runs' configuration")
    overrides = [word for word in words if OVERRIDE.match(word)]
    args = parser.parse_intermixed_args([word for word in words if not OVERRIDE.match(word)])
    args.more += overrides
    return args


def training_command(options: Mapping[str, object], *more: object) -> list[str]:
    """Return the command that trains on packs, samples in the order of the shards.

    Args:
        options: flags with a value.
        more: flags without one, and key=value overrides.
    """
    words: list[object] = [sys.executable, ROOT / "scripts" / "train" / "run.py", "--packing"]
    words += [word for option in options.items() for word in option]
    return [str(word) for word in (*words, "data.shuffle_buffer_size=0", *more)]


def run_command(
    command: Sequence[str], result: Path, env: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[dict[str, Any]], str]:
    """Run it, with `env` added to the environment; return the lines of its result, or the end of what it printed,
    one line of it where the disk was full.

    Interrupted, as by `timeout --signal INT`, it prints how far the run has got.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            done = subprocess.run(
                ending_with_us(command), cwd=ROOT, env=os.environ | env, stdout=said, stderr=said, check=False
            )
        except KeyboardInterrupt:
            print(_end_of(said), flush=True)
            raise
        if done.returncode == 0:
            return read_lines(result), ""
        end = _end_of(said)
        return [], (disk_full(end) if DISK_FULL in end else end)


def disk_full(text: str) -> str:
    """Return one line from what a run printed before it died of a full disk."""
    lines = [line.strip() for line in text.splitlines() if DISK_FULL in line]
    return f"the disk was full: {lines[-1]}"


def _end_of(file: TextIO) -> str:
    file.seek(0)
    return file.read()[-6000:]


def ending_with_us(command: Sequence[str]) -> list[str]:
    """Return the command of a run that is interrupted when this process ends, for example because `timeout` ends it.

    Otherwise the run would stay on the GPUs beside the next benchmark.
    """
    return tied_command(command, signal.SIGINT)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines, none if the file does not exist."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
