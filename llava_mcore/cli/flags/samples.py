"""Flags for samples, shared by commands. Training has keys of the same names under `data`."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from typing import get_args

from llava_mcore.config.sections.data import LIMITS, Handling, Limits, PixelRange
from llava_mcore.errors import ConfigError
from llava_mcore.prepare.sampling import Sampling

MEANINGS = {
    "sample_bytes": "bytes of a sample, its json, pictures, frames and sounds together",
    "text_chars": "characters of a conversation",
    "picture_pixels": "width times height of a picture or frame",
    "frames": "frames of all videos of a conversation together",
}


def add_sample_flags(parser: argparse._ActionsContainer) -> None:
    """Add the limits of a sample, and how special tokens in its text are read."""
    parser.add_argument(
        "--special-tokens-in-text",
        choices=get_args(Handling),
        default="text",
        help="how to read special tokens such as <|im_end|> in conversations: as plain text (default) or as tokens",
    )
    for field in fields(Limits):
        parser.add_argument(
            _flag(field.name),
            type=int,
            default=field.default,
            metavar="N",
            help=f"maximum {MEANINGS[field.name]}; larger ones are skipped (default {field.default})",
        )


def add_pixel_flags(parser: argparse._ActionsContainer) -> None:
    """Add the limits of the areas of resized pictures and frames."""
    of_picture = "resized picture, for Qwen-VL (default: the image processor's)"
    of_frame = "resized frame of a video, in Qwen3-VL of all its frames together (default: the video processor's)"
    for prefix, unit in (("--", of_picture), ("--video-", of_frame)):
        for end, limit in (("min-pixels", "minimum"), ("max-pixels", "maximum")):
            parser.add_argument(
                f"{prefix}{end}", type=positive, metavar="N", help=f"{limit} width x height of a {unit}"
            )


def pixels_of(args: argparse.Namespace) -> PixelRange:
    """Return the range of pictures from the flags."""
    return PixelRange(args.min_pixels, args.max_pixels)


def video_pixels_of(args: argparse.Namespace) -> PixelRange:
    """Return the range of frames from the flags."""
    return PixelRange(args.video_min_pixels, args.video_max_pixels)


def add_frame_flags(parser: argparse._ActionsContainer) -> None:
    """Add how video files are sampled."""
    parser.add_argument(
        "--video-fps",
        type=above_zero,
        default=Sampling().fps,
        metavar="FPS",
        help="frames per second to keep from a video file (default 2)",
    )
    parser.add_argument(
        "--video-max-frames",
        type=positive,
        default=Sampling().max_frames,
        metavar="N",
        help="most frames to keep from a video file; a longer one is sampled at a lower rate (default 128)",
    )


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def limits_of(args: argparse.Namespace) -> Limits:
    """Return the limits from the flags. Raises ConfigError for an invalid one."""
    limits = Limits(**{field.name: vars(args)[f"max_{field.name}"] for field in fields(Limits)})
    wrong = [f"{_flag(f.name)} must be at least 1" for f in fields(Limits) if vars(args)[f"max_{f.name}"] < 1]
    if limits.picture_pixels > LIMITS.picture_pixels:
        wrong.append(f"{_flag('picture_pixels')} must be at most {LIMITS.picture_pixels}: Pillow decodes no more")
    if wrong:
        raise ConfigError("; ".join(wrong))
    return limits


def _flag(name: str) -> str:
    return f"--max-{name.replace('_', '-')}"
