"""Flags of `generate`, and those that `chat` shares."""

from __future__ import annotations

import argparse
from pathlib import Path

from llava_mcore.cli.flags.conversion import BASE_DIR_HELP, DTYPE_NAMES
from llava_mcore.cli.flags.samples import (
    above_zero,
    add_frame_flags,
    add_pixel_flags,
    add_sample_flags,
    positive,
)
from llava_mcore.templates.named import NAMES

SPLITS = ("train", "val", "test")


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore generate`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore generate",
        allow_abbrev=False,
        description="Answer a question about pictures, videos or sounds, or all questions of a prepared dataset. "
        "A Hugging Face folder is run by transformers, a Megatron checkpoint by tp x pp processes with a key/value "
        "cache. Both give the same tokens. Runs on GPUs if there are any.",
    )
    model = p.add_argument_group("the model: one of --hf-dir and --megatron-dir")
    model.add_argument("--hf-dir", type=Path, help="Hugging Face folder")
    model.add_argument("--megatron-dir", type=Path, help="Megatron checkpoint, or a folder of them (newest is used)")
    model.add_argument("--tp", type=positive, default=1, metavar="N", help="tensor-parallel size (default 1)")
    model.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline-parallel size (default 1)")
    model.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="questions of a dataset that a Megatron checkpoint answers at the same time (default 8)",
    )  # fmt: skip
    model.add_argument("--base-dir", type=Path, metavar="DIR", help=BASE_DIR_HELP)
    add_loading_flags(model)
    one = p.add_argument_group("one question")
    one.add_argument("--question", help="text; <image>, <video> and <audio> may mark positions (default: at the start)")
    one.add_argument("--image", type=Path, action="append", default=[], metavar="FILE", help="picture; may be repeated")
    one.add_argument("--video", type=Path, action="append", default=[], metavar="FILE", help="video; may be repeated")
    one.add_argument("--audio", type=Path, action="append", default=[], metavar="FILE", help="sound; may be repeated")
    add_frame_flags(one)
    many = p.add_argument_group("the questions of a dataset")
    many.add_argument("--data-path", help="prepared folder or a blend's .yaml")
    many.add_argument("--split", choices=SPLITS, help="split (default val)")
    many.add_argument("--num-samples", type=positive, metavar="N", help="ask only N, evenly distributed")
    many.add_argument(
        "--every-answer", action="store_true",
        help="ask for every answer of a conversation, after the true answers before it (default: for the last one)",
    )  # fmt: skip
    many.add_argument("--out", type=Path, metavar="FILE", help="jsonl to write: key, question, reference, answer")
    add_answer_flags(p)
    p.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")
    return p


def add_loading_flags(parser: argparse._ActionsContainer) -> None:
    """Add how a Hugging Face folder is loaded."""
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype in memory (default: that of config.json)")
    parser.add_argument("--load-in-4bit", action="store_true", help="a Hugging Face folder's weights in 4 bits (nf4)")
    parser.add_argument("--load-in-8bit", action="store_true", help="a Hugging Face folder's weights in 8 bits")


def add_answer_flags(parser: argparse.ArgumentParser, title: str = "answers") -> None:
    """Add how tokens are chosen, how conversations are read, and the size of pictures."""
    p = parser.add_argument_group(title)
    p.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="maximum per answer (default 128)")
    p.add_argument(
        "--temperature", type=above_zero, metavar="T",
        help="sample tokens at this temperature (default: take the most probable one)",
    )  # fmt: skip
    p.add_argument("--top-p", type=float, metavar="P", help="sample from the most probable tokens, P in total")
    p.add_argument("--top-k", type=positive, metavar="K", help="sample from the K most probable tokens")
    p.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    p.add_argument("--chat-template", help=f"template, not the folder's: {', '.join(NAMES)}, or a .jinja file")
    add_sample_flags(p)
    add_pixel_flags(p)
