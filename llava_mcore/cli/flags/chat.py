"""Flags of `chat`."""

from __future__ import annotations

import argparse
from pathlib import Path

from llava_mcore.cli.flags.generate import add_answer_flags, add_loading_flags
from llava_mcore.cli.flags.samples import add_frame_flags


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore chat`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore chat",
        allow_abbrev=False,
        description="Chat about pictures, videos or sounds with a Hugging Face folder's model in the terminal. /help "
        "lists the commands, such as /image FILE. Runs on a GPU if there is one.",
    )
    p.add_argument("--hf-dir", type=Path, required=True, help="Hugging Face folder")
    p.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="picture of the first question"
    )
    add_loading_flags(p)
    add_frame_flags(p)
    add_answer_flags(p)
    p.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")
    return p
