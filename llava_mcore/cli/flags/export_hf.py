"""Flags of `export-hf`."""

from __future__ import annotations

import argparse
from pathlib import Path

from llava_mcore.cli.flags.conversion import BASE_DIR_HELP, add_flags


def parser() -> argparse.ArgumentParser:
    """Flags of convert_megatron_to_hf.py."""
    p = argparse.ArgumentParser(
        prog="convert_megatron_to_hf.py",
        allow_abbrev=False,
        description="Convert the newest Megatron checkpoint of a folder into a Hugging Face folder.",
    )
    p.add_argument("--megatron-dir", type=Path, required=True, help="folder with latest_checkpointed_iteration.txt")
    p.add_argument("--hf-dir", type=Path, required=True, help="folder to write; must be new or empty")
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel size to check for (default 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    p.add_argument(
        "--hf-config", type=Path, metavar="DIR",
        help="Hugging Face folder of the same model (config.json is enough), for a checkpoint that llava_mcore did "
        "not write",
    )  # fmt: skip
    p.add_argument("--tokenizer-dir", type=Path, help="copy tokenizer and processor files from this folder")
    p.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="maximum size of a file, such as 5GB (default: the files of the import)",
    )
    p.add_argument(
        "--no-verify-checkpoint", action="store_true",
        help="do not compare the checkpoint's files with their checksums",
    )  # fmt: skip
    group = p.add_argument_group("runs with an adapter", "are exported as a PEFT folder, unless --merge is given")
    group.add_argument("--merge", action="store_true", help="write the whole model with its adapters in its weights")
    group.add_argument("--adapter", metavar="NAME", help="which of several adapters (default: the trained one)")
    group.add_argument(
        "--base-model",
        metavar="NAME",
        help="the adapter's base model in the PEFT folder (default: the imported folder)",
    )
    group.add_argument("--base-dir", type=Path, metavar="DIR", help=f"with --merge: {BASE_DIR_HELP}")
    add_flags(p, source="the checkpoint")
    return p
