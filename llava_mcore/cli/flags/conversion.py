"""Flags that import, export and check share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

DTYPE_NAMES = ("fp32", "bf16", "fp16")
LOGITS_HELP = "compare fp32 logits on this picture with Hugging Face's, in tp x pp processes over gloo"


def default_workers() -> int:
    """Return how many threads convert unless told: each writes and has others hash, and four outrun most disks."""
    return min(len(os.sched_getaffinity(0)), 4)


def add_flags(parser: argparse.ArgumentParser, *, source: str) -> None:
    """Add the flags that both directions have. `source`: what the dtype is kept of."""
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help=f"cast the weights (default: as {source})")
    parser.add_argument(
        "--workers", type=_positive, default=default_workers(), metavar="N",
        help="threads that convert (default: as many as cores, at most 4); the result is the same for any N",
    )  # fmt: skip
    parser.add_argument(
        "--verify", action="store_true", help="read back what was written and compare the SHA-256 of every tensor"
    )
    parser.add_argument("--logits", type=Path, metavar="PICTURE", help=f"afterwards, {LOGITS_HELP}")
    parser.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
