"""Flags about samples that `prepare` and `check` share. Training has them as keys of the same names under `data`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import get_args

from llava_mcore.config.sections.data import LIMITS, Handling, Limits
from llava_mcore.errors import ConfigError

MEANINGS = {
    "sample_bytes": "bytes of a sample, its json, pictures and frames together",
    "text_chars": "characters of a conversation",
    "picture_pixels": "width times height of a picture or frame",
    "frames": "frames of all videos of a conversation together",
}


def add_sample_flags(parser: argparse._ActionsContainer) -> None:
    """Add what may become of a sample: its limits, and special tokens in its text."""
    parser.add_argument(
        "--special-tokens-in-text",
        choices=get_args(Handling),
        default="text",
        help="what <|im_end|> and the like are in the text of a conversation: plain text (default), or the tokens",
    )
    for field in fields(Limits):
        parser.add_argument(
            _flag(field.name),
            type=int,
            default=field.default,
            metavar="N",
            help=f"most {MEANINGS[field.name]}; what has more is left out (default {field.default})",
        )


def limits_of(args: argparse.Namespace) -> Limits:
    """Return the limits that the flags say. ConfigError if one makes no sense."""
    found = Limits(**{field.name: vars(args)[f"max_{field.name}"] for field in fields(Limits)})
    wrong = [f"{_flag(f.name)} must be at least 1" for f in fields(Limits) if vars(args)[f"max_{f.name}"] < 1]
    if found.picture_pixels > LIMITS.picture_pixels:
        wrong.append(f"{_flag('picture_pixels')} must be at most {LIMITS.picture_pixels}: Pillow decodes no more")
    if wrong:
        raise ConfigError("; ".join(wrong))
    return found


def _flag(name: str) -> str:
    return f"--max-{name.replace('_', '-')}"
