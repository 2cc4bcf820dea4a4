"""Flags that several commands share, and what they mean for the library. Training has keys of the same names under
`data`."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from llava_mcore.config.sections.data import LIMITS, Handling, Limits, PixelRange
from llava_mcore.errors import ConfigError
from llava_mcore.prepare.sampling import FrameRule, Sampling
from llava_mcore.templates.named import NAMES

if TYPE_CHECKING:
    from llava_mcore.inference.answering.hf_model import Quantization
    from llava_mcore.inference.answering.job import ReadOptions
    from llava_mcore.inference.generation.settings import TokenSampling

DTYPE_NAMES = ("fp32", "bf16", "fp16")
LOGITS_HELP = "compare fp32 logits on this image or audio clip with Hugging Face's, in tp x pp processes over gloo"

BASE_DIR_HELP = "checkpoints with the weights that an adapter was trained on (default: their folder in training)"
SPLITS = ("train", "val", "test")
MEANINGS = {
    "sample_bytes": "bytes of a sample, its json, images, frames and audio clips together",
    "text_chars": "characters of a conversation",
    "image_pixels": "width times height of an image or frame",
    "frames": "frames of all videos of a conversation together",
}


def default_workers() -> int:
    """Return the default number of threads: each writes while others hash, and four are faster than most disks."""
    return min(len(os.sched_getaffinity(0)), 4)


def add_conversion_flags(parser: argparse.ArgumentParser, *, source: str) -> None:
    """Add the flags of both directions. `source`: origin of the default dtype."""
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help=f"cast the weights (default: the dtype of {source})")
    parser.add_argument(
        "--workers", type=positive, default=default_workers(), metavar="N",
        help="number of threads (default: number of cores, at most 4); the result is the same for any N",
    )  # fmt: skip
    parser.add_argument(
        "--verify", action="store_true", help="read back what was written and compare the SHA-256 of every tensor"
    )
    parser.add_argument("--logits", type=Path, metavar="FILE", help=f"afterwards, {LOGITS_HELP}")
    parser.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")


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
    """Add the limits of the areas of resized images and frames."""
    of_image = "resized image, for Qwen-VL (default: the image processor's)"
    of_frame = "resized frame of a video, in Qwen3-VL of all its frames together (default: the video processor's)"
    for prefix, unit in (("--", of_image), ("--video-", of_frame)):
        for end, limit in (("min-pixels", "minimum"), ("max-pixels", "maximum")):
            parser.add_argument(
                f"{prefix}{end}", type=positive, metavar="N", help=f"{limit} width x height of a {unit}"
            )


def pixels_of(args: argparse.Namespace) -> PixelRange:
    """Return the range of images from the flags."""
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
        help="maximum frames to keep from a video file; longer ones are sampled at a lower rate (default 128)",
    )

    parser.add_argument(
        "--video-sampling", choices=get_args(FrameRule), default="times",
        help="which frames of a video file: those shown at evenly spaced times (default), or those that transformers' "
        "video processor of this class keeps",
    )  # fmt: skip


def frame_sampling_of(args: argparse.Namespace) -> Sampling:
    """Return what `add_frame_flags` says."""
    return Sampling.by_rule(args.video_sampling, args.video_fps, args.video_max_frames)


def add_layout_flags(parser: argparse._ActionsContainer, default: int | None = None, *, replicas: bool = False) -> None:
    """Add --tp, --cp and --pp of a Megatron checkpoint that answers; with `replicas` also --replicas."""
    tokens = "context-parallel size: processes that divide the tokens of long prompts"
    for flag, text in (("--tp", "tensor-parallel size"), ("--cp", tokens), ("--pp", "pipeline-parallel size")):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} (default 1)")
    if replicas:
        text = (
            "copies of the model, each on tp x cp x pp processes, that share the questions of --data-path (default 1)"
        )
        parser.add_argument("--replicas", type=positive, default=default, metavar="N", help=text)


def add_loading_flags(parser: argparse._ActionsContainer) -> None:
    """Add how a Hugging Face folder is loaded."""
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype in memory (default: that of config.json)")
    parser.add_argument("--load-in-4bit", action="store_true", help="a Hugging Face folder's weights in 4 bits (nf4)")
    parser.add_argument("--load-in-8bit", action="store_true", help="a Hugging Face folder's weights in 8 bits")


def add_answer_flags(parser: argparse.ArgumentParser, title: str = "answers") -> None:
    """Add how tokens are chosen, how conversations are read, and the size of images."""
    p = parser.add_argument_group(title)
    p.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="maximum per answer (default 128)")
    p.add_argument(
        "--temperature", type=above_zero, metavar="T",
        help="sample tokens at this temperature (default: take the most probable one)",
    )  # fmt: skip
    p.add_argument("--top-p", type=float, metavar="P", help="sample from the most probable tokens, P in total")
    p.add_argument("--top-k", type=positive, metavar="K", help="sample from the K most probable tokens")
    p.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    p.add_argument("--chat-template", help=f"template instead of the folder's: {', '.join(NAMES)}, or a .jinja file")
    add_sample_flags(p)
    add_pixel_flags(p)


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


def port(text: str) -> int:
    """Return a port's number, of an argument."""
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"{value} is not a port: 0 to 65535")
    return value


def limits_of(args: argparse.Namespace) -> Limits:
    """Return the limits from the flags. Raises ConfigError for an invalid one."""
    limits = Limits(**{field.name: vars(args)[f"max_{field.name}"] for field in fields(Limits)})
    wrong = [f"{_flag(f.name)} must be at least 1" for f in fields(Limits) if vars(args)[f"max_{f.name}"] < 1]
    if limits.image_pixels > LIMITS.image_pixels:
        wrong.append(f"{_flag('image_pixels')} must be at most {LIMITS.image_pixels}: Pillow decodes no more")
    if wrong:
        raise ConfigError("; ".join(wrong))
    return limits


def reading_of(args: argparse.Namespace) -> ReadOptions:
    """Return how conversations are read. ConfigError for an invalid limit."""
    from llava_mcore.inference.answering.job import ReadOptions

    return ReadOptions(args.chat_template, args.special_tokens_in_text, limits_of(args), pixels_of(args))


def sampling_of(args: argparse.Namespace) -> TokenSampling:
    """Return how tokens are chosen. ConfigError for values that cannot be used together."""
    from llava_mcore.inference.generation.settings import TokenSampling

    return TokenSampling(args.temperature, args.top_p, args.top_k, args.seed)


def quantization_of(args: argparse.Namespace) -> Quantization | None:
    """Return what the weights are loaded in. ConfigError for both."""
    if args.load_in_4bit and args.load_in_8bit:
        raise ConfigError("--load-in-4bit and --load-in-8bit exclude each other")
    return "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None


def _flag(name: str) -> str:
    return f"--max-{name.replace('_', '-')}"
