"""Flags of `import-hf`."""

from __future__ import annotations

import argparse
from pathlib import Path

from llava_mcore.cli.flags.conversion import add_flags


def parser() -> argparse.ArgumentParser:
    """Flags of convert_hf_to_megatron.py."""
    p = argparse.ArgumentParser(
        prog="convert_hf_to_megatron.py",
        allow_abbrev=False,
        description="Convert a Hugging Face folder into a Megatron checkpoint (torch_dist), exactly and without "
        "a GPU. The checkpoint loads at any tensor x pipeline x data parallel size.",
    )
    p.add_argument("--hf-dir", type=Path, required=True, help="Hugging Face folder to read")
    p.add_argument("--megatron-dir", type=Path, required=True, help="folder to write; must be new or empty")
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel size for chunks and padding (default 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    add_flags(p, source="each tensor in the source")
    return p
