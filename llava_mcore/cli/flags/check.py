"""Flags of `check`, for models and for data."""

from __future__ import annotations

import argparse
from pathlib import Path

from llava_mcore.cli.flags.conversion import LOGITS_HELP
from llava_mcore.cli.flags.samples import add_sample_flags
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.templates.named import NAMES

DEFAULTS = DataConfig()


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore check`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore check",
        allow_abbrev=False,
        description="Check that a Hugging Face folder converts completely; with --megatron-dir, also that the "
        "newest checkpoint there holds exactly the folder's weights; with --logits, also that it computes the same. "
        "--megatron-dir alone compares a checkpoint with its checksums, an import also with its manifest. Or, with "
        "--data-path, look a dataset over as training will read it. Exit code 0 means yes, 2 no.",
    )
    model = p.add_argument_group("a model")
    model.add_argument("--hf-dir", type=Path, help="Hugging Face folder")
    model.add_argument("--megatron-dir", type=Path, help="folder of Megatron checkpoints to compare with it")
    model.add_argument("--tp", type=int, default=1, help="tensor-parallel size to check and read for (default 1)")
    model.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    model.add_argument("--logits", type=Path, metavar="PICTURE", help=LOGITS_HELP)
    add_data_flags(p)
    return p


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for data; those that training has too mean the same there."""
    p = parser.add_argument_group("a dataset")
    p.add_argument("--data-path", type=Path, help="prepared folder, or a blend's .yaml, to look over")
    p.add_argument("--tokenizer-load-dir", type=Path, help="Hugging Face folder with tokenizer and processor")
    p.add_argument("--chat-template", help=f"template to train with: {', '.join(NAMES)}, or a .jinja file")
    p.add_argument("--lang", choices=("jp", "en"), help="language of prompts for data without questions")
    p.add_argument("--seq-length", type=int, default=DEFAULTS.seq_length, help="most tokens of a sample (default 2048)")
    add_sample_flags(p)
    rate = DEFAULTS.max_skip_rate
    p.add_argument("--max-skip-rate", type=float, default=rate, help="part that may be left out (default 0.01)")
    p.add_argument("--full", action="store_true", help="look at every sample, not at some of every shard")
    p.add_argument("--num-workers", type=int, default=0, help="processes that look (default 0: this one)")
    p.add_argument("--show", type=int, default=1, help="conversations to print (default 1)")
    p.add_argument("--json", type=Path, help="also write the report to this file")
