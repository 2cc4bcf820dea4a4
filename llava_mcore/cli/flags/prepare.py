"""Flags of `prepare`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from llava_mcore.cli.flags.samples import above_zero, add_frame_flags, add_pixel_flags, add_sample_flags, positive
from llava_mcore.prepare.formats import FORMATS

EPILOG = """\
formats (detected, or set with --format):
  llava         .json list or .jsonl with "conversations" [{"from": "human", "value": "<image>\\n…"}, …] and "image",
                "video" or "audio"
  sharegpt      .json list or .jsonl with "messages" [{"role": "user", "content": "…"}, …] and "images", "videos" or
                "audios"
  openai        like sharegpt, with "content" as typed parts: text, image_url with a path, a file:// or a data: URI,
                video_url, audio_url
  parquet, huggingface
                .parquet files, a folder of them, or a folder saved by `datasets`; pictures as struct{bytes, path},
                bytes or
                path; conversations, messages, texts or question/answer columns
  vqa           a folder or tar files of NNN.jpg, NNN.txt (answer) and NNN.json ({"question": …})
  a .yaml file  lists several sources with weights or epochs; each gets its own folder, and DIR/blend.yaml
                is the --data-path

Run the same command again to continue after an interruption. See docs/prepare.md.
exit codes: 0 finished; 2 wrong input, or more than --max-skip-rate of the rows skipped
"""


def parser() -> argparse.ArgumentParser:
    """Flags of `prepare`."""
    p = argparse.ArgumentParser(
        prog="prepare.py",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write energon shards with their index from conversations in any common format. Broken rows are "
        "skipped, listed\nand counted.",
        epilog=EPILOG,
    )
    p.add_argument("sources", nargs="+", type=Path, metavar="SRC", help="files or folders, or a .yaml that lists them")
    p.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to write: new, or started by this command"
    )
    p.add_argument("--format", choices=FORMATS, default="auto", help="format of the sources (default: auto)")
    p.add_argument("--image-dir", type=Path, help="base folder of relative paths (default: that of the source file)")
    p.add_argument("--source-split", default="train", help="split of a Hugging Face dataset (default: train)")
    p.add_argument("--image-key", help="field with the pictures (default: image or images)")
    p.add_argument("--question-key", help="field with the question (default: question, instruction, …)")
    p.add_argument("--answer-key", help="field with the answer (default: answer, answers, …)")
    p.add_argument("--captions", action="store_true", help="there are no questions; the picture is the question")
    p.add_argument(
        "--tokenizer-load-dir",
        type=Path,
        metavar="T",
        help="count tokens as in training with this folder",
    )
    p.add_argument("--chat-template", help="template to count with, a name or a .jinja file (default: that of T)")
    p.add_argument("--lang", choices=("jp", "en"), help="selects the template if T has none")
    p.add_argument("--pack-to", type=positive, metavar="N", help="pack conversations offline into samples of N tokens")
    p.add_argument(
        "--samples-per-shard",
        type=positive,
        default=1000,
        metavar="N",
        help="rows per tar file; --val-ratio counts these files (default 1000)",
    )
    p.add_argument(
        "--val-ratio", type=_ratio, default=0.0, metavar="R", help="fraction of the shards for validation (0)"
    )
    p.add_argument(
        "--check-images", action="store_true", help="decode every picture and sound (default: read its header)"
    )
    _add_video_flags(p)
    p.add_argument("--audio-key", help="field with the sounds (default: audio or audios)")
    add_sample_flags(p)
    add_pixel_flags(p)
    p.add_argument(
        "--max-skip-rate", type=_ratio, default=0.01, metavar="R", help="allowed fraction of skipped rows (0.01)"
    )
    p.add_argument("--num-workers", type=int, default=_num_cpus(), metavar="N", help="processes (default: all cores)")
    p.add_argument("--overwrite", action="store_true", help="delete what this command wrote there, and start again")
    return p


def _add_video_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("--video-key", help="field with the videos (default: video or videos)")
    add_frame_flags(p)
    p.add_argument(
        "--frames-fps",
        type=above_zero,
        metavar="FPS",
        help="frames per second of videos that are lists of frames without fps (default: unknown, which Qwen2.5-VL and "
        "Qwen3-VL count as 24)",
    )


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))
