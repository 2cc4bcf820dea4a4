"""Flags of `check`, for models and for data."""

from __future__ import annotations

import argparse
from pathlib import Path

from llava_mcore.cli.flags.conversion import BASE_DIR_HELP, LOGITS_HELP
from llava_mcore.cli.flags.samples import add_pixel_flags, add_sample_flags, positive
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.templates.named import NAMES

DEFAULTS = DataConfig()


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore check`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore check",
        allow_abbrev=False,
        description="Check that a Hugging Face folder can be converted completely; with --megatron-dir, also that the "
        "newest checkpoint there holds exactly the folder's weights; with --logits, also that it computes the same. "
        "--megatron-dir alone compares a checkpoint with its checksums, and an import also with its manifest. "
        "--data-path checks a dataset as training will read it. Exit code 0: no problems, 2: problems.",
    )
    model = p.add_argument_group("a model")
    model.add_argument("--hf-dir", type=Path, help="Hugging Face folder")
    model.add_argument("--megatron-dir", type=Path, help="folder of Megatron checkpoints to compare with it")
    model.add_argument("--tp", type=int, default=1, help="tensor-parallel size to check and read for (default 1)")
    model.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    model.add_argument("--logits", type=Path, metavar="FILE", help=LOGITS_HELP)
    model.add_argument("--base-dir", type=Path, metavar="DIR", help=f"with --logits: {BASE_DIR_HELP}")
    add_data_flags(p)
    return p


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for data; they have the same meaning as for training."""
    p = parser.add_argument_group("a dataset")
    p.add_argument("--data-path", type=Path, help="prepared folder, or a blend's .yaml, to check")
    p.add_argument("--tokenizer-load-dir", type=Path, help="Hugging Face folder with tokenizer and processor")
    p.add_argument("--chat-template", help=f"template to train with: {', '.join(NAMES)}, or a .jinja file")
    p.add_argument("--lang", choices=("jp", "en"), help="language of prompts for data without questions")
    p.add_argument(
        "--seq-length", type=int, default=DEFAULTS.seq_length, help="maximum tokens of a sample (default 2048)"
    )
    p.add_argument(
        "--max-media-tokens",
        type=positive,
        metavar="N",
        help="maximum patches of the pictures and frames (of sound: 20 ms frames) of a sample, and of a pack "
        "(data.max_media_tokens; default: any number)",
    )
    add_sample_flags(p)
    add_pixel_flags(p)
    rate = DEFAULTS.max_skip_rate
    p.add_argument(
        "--max-skip-rate", type=float, default=rate, help="fraction of samples that may be skipped (default 0.01)"
    )
    p.add_argument("--full", action="store_true", help="check every sample, not only some of every shard")
    p.add_argument("--num-workers", type=int, default=0, help="worker processes (default 0: this process)")
    p.add_argument("--show", type=int, default=1, help="conversations to print (default 1)")
    p.add_argument("--json", type=Path, help="also write the report to this file")
