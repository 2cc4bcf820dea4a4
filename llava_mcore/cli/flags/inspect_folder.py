"""Flags of `inspect`."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore inspect`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore inspect",
        allow_abbrev=False,
        description="Show the contents of a Hugging Face folder or a folder of Megatron checkpoints: parts, what is "
        "trained, dtypes, layout, iteration, shapes. Reads headers only.",
    )
    p.add_argument("dir", type=Path, metavar="DIR", help="a Hugging Face folder, or one with Megatron checkpoints")
    return p
