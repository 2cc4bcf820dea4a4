"""Flags shared by import, export and check."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

DTYPE_NAMES = ("fp32", "bf16", "fp16")
LOGITS_HELP = "compare fp32 logits on this picture or sound with Hugging Face's, in tp x pp processes over gloo"

BASE_DIR_HELP = "checkpoints with the weights that an adapter was trained on (default: the folder at that time)"


def default_workers() -> int:
    """Return the default number of threads: each writes while others hash, and four are faster than most disks."""
    return min(len(os.sched_getaffinity(0)), 4)


def add_flags(parser: argparse.ArgumentParser, *, source: str) -> None:
    """Add the flags of both directions. `source`: origin of the default dtype."""
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help=f"cast the weights (default: the dtype of {source})")
    parser.add_argument(
        "--workers", type=_positive, default=default_workers(), metavar="N",
        help="number of threads (default: number of cores, at most 4); the result is the same for any N",
    )  # fmt: skip
    parser.add_argument(
        "--verify", action="store_true", help="read back what was written and compare the SHA-256 of every tensor"
    )
    parser.add_argument("--logits", type=Path, metavar="FILE", help=f"afterwards, {LOGITS_HELP}")
    parser.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
