"""`prepare`: users' conversations and images → energon shards, ready for --data-path. Needs no GPU."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.cli.base.entry import command_main
from llava_mcore.cli.base.prepare_bar import PrepareBar
from llava_mcore.cli.base.shared_flags import (
    above_zero,
    add_frame_flags,
    add_pixel_flags,
    add_sample_flags,
    frame_sampling_of,
    limits_of,
    pixels_of,
    positive,
    video_pixels_of,
)
from llava_mcore.errors import DataError, problems
from llava_mcore.files.near_match import require_exists
from llava_mcore.prepare.sources.formats import FORMATS

if TYPE_CHECKING:
    from rich.console import Console

    from llava_mcore.prepare.prepare_source import Result
    from llava_mcore.prepare.shard_plan import Counting, Options
    from llava_mcore.prepare.sources.detect import Opening

EPILOG = """\
formats (detected, or set with --format):
  llava         .json list or .jsonl with "conversations" [{"from": "human", "value": "<image>\\n…"}, …] and "image",
                "video" or "audio"
  sharegpt      .json list or .jsonl with "messages" [{"role": "user", "content": "…"}, …] and "images", "videos" or
                "audios"
  openai        like sharegpt, with "content" as typed parts: text, image_url with a path, a file:// or a data: URI,
                video_url, audio_url
  parquet, huggingface
                .parquet files, a folder of them, or a folder saved by `datasets`; images as struct{bytes, path},
                bytes or
                path; conversations, messages, texts or question/answer columns
  vqa           a folder or tar files of NNN.jpg, NNN.txt (answer) and NNN.json ({"question": …})
  a .yaml file  lists several sources with weights or epochs; each gets its own folder, and DIR/blend.yaml
                is the --data-path

Run the same command again to continue after an interruption. See docs/prepare.md.
exit codes: 0 finished; 2 wrong input, or more than --max-skip-rate of the rows skipped
"""
LISTED = {"sources": [], "options": {"SRC": "a list of sources"}}
"""Marker in the folder of a blend: the list may change, because each source is checked separately."""


def parser() -> argparse.ArgumentParser:
    """Flags of `prepare`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore prepare",
        usage="%(prog)s SRC … --out DIR [--tokenizer-load-dir DIR] [--image-dir DIR] [FLAG …]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write energon shards with their index from conversations in any common format. Broken rows are "
        "skipped, listed\nand counted.",
        epilog=EPILOG,
    )
    # Where rows and media are.
    p.add_argument(
        "sources", nargs="+", metavar="SRC", help="files, folders or URLs (hf://datasets/…), or a .yaml that lists them"
    )
    p.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to write: new, or started by this command"
    )
    p.add_argument("--format", choices=FORMATS, default="auto", help="format of the sources (default: auto)")
    p.add_argument("--image-dir", type=Path, help="base folder of relative paths (default: that of the source file)")
    p.add_argument("--source-split", default="train", help="split of a Hugging Face dataset (default: train)")
    p.add_argument("--image-key", help="field with the images (default: image or images)")
    p.add_argument("--question-key", help="field with the question (default: question, instruction, …)")
    p.add_argument("--answer-key", help="field with the answer (default: answer, answers, …)")
    p.add_argument("--captions", action="store_true", help="allow rows without a question, such as captions")
    p.add_argument(
        "--preference-pairs", action="store_true", help="rows have a chosen and a rejected answer (docs/prepare.md)"
    )
    _add_shard_flags(p)
    p.add_argument(
        "--check-images", action="store_true", help="decode every image and audio clip (default: read its header)"
    )
    _add_video_flags(p)
    p.add_argument("--audio-key", help="field with the audio clips (default: audio or audios)")
    add_sample_flags(p)
    add_pixel_flags(p)
    p.add_argument(
        "--max-skip-rate", type=_ratio, default=0.01, metavar="R", help="allowed fraction of skipped rows (0.01)"
    )
    p.add_argument("--num-workers", type=int, default=_num_cpus(), metavar="N", help="processes (default: all cores)")
    p.add_argument("--overwrite", action="store_true", help="delete what this command wrote there, and start again")
    return p


def _add_shard_flags(p: argparse.ArgumentParser) -> None:
    """Add how samples are counted, packed and divided over shards."""
    p.add_argument(
        "--tokenizer-load-dir",
        type=Path,
        metavar="T",
        help="folder to count tokens with, as in training",
    )
    p.add_argument("--chat-template", help="template to count with, a name or a .jinja file (default: that of T)")
    p.add_argument("--lang", choices=("jp", "en"), help="language, which selects a template if T has none")
    p.add_argument("--pack-to", type=positive, metavar="N", help="pack conversations offline into samples of N tokens")
    p.add_argument(
        "--sample-multiple", type=positive, default=1, metavar="M",
        help="with --pack-to: round the length of each conversation up to a multiple of M; for training with --cp, use "
        "2 x cp (default 1)",
    )  # fmt: skip
    p.add_argument(
        "--samples-per-shard", type=positive, metavar="N",
        help="rows per tar file; --val-ratio counts these files (default 1000, or fewer for --val-ratio of few rows)",
    )  # fmt: skip
    p.add_argument("--max-rows", type=positive, metavar="N", help="read only the first N rows of the sources")
    p.add_argument("--shuffle-seed", type=int, default=0, metavar="N", help="seed of the order of rows (default 0)")
    p.add_argument("--keep-order", action="store_true", help="do not shuffle: rows keep the order of the sources")
    p.add_argument(
        "--val-ratio", type=_ratio, default=0.0, metavar="R",
        help="fraction of the tar files, not of the rows, for validation (0)",
    )  # fmt: skip


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


def run(args: argparse.Namespace) -> int:
    """Prepare the data and print the summary. Returns 2 if too many rows were skipped."""
    # A wrong path is reported before the imports that take seconds.
    for source in args.sources:
        if "://" not in source and Path(source).suffix not in (".yaml", ".yml"):
            require_exists(Path(source))
    from rich.console import Console

    from llava_mcore.prepare.listing import BLEND, is_listing
    from llava_mcore.prepare.shard_plan import Options
    from llava_mcore.prepare.summary import draw, failures, show

    options = Options(
        rows_per_shard=args.samples_per_shard,
        most_rows=args.max_rows,
        val_ratio=args.val_ratio,
        shuffle_seed=None if args.keep_order else args.shuffle_seed,
        counting=_counting(args),
        pack_to=args.pack_to,
        sample_multiple=args.sample_multiple,
        check_images=args.check_images,
        sampling=frame_sampling_of(args),
        limits=limits_of(args),
    )
    # A listing prepares a dataset for each of its sources, and a blend of them.
    _check(args)
    console = Console()
    is_blend = is_listing(Path(args.sources[0]))
    try:
        results = _prepare_listed(args, options, console) if is_blend else [_prepare_one(args, options, console)]
    except OSError as error:
        hint = "fix the disk and run the command again, which keeps finished shards; or choose another --out"
        raise DataError(f"--out {args.out} cannot be written: {error}; {hint}") from error
    # The summary comes before the errors, so that an incomplete dataset is explained.
    show(console, results)
    images = [path for result in results if result.counts.conversations for path in draw(result)]
    failed = failures(results, args.max_skip_rate)
    if failed:
        raise DataError(problems("the data was not completed", failed))
    if options.counting is None:
        console.print("Tokens were not counted: give --tokenizer-load-dir for exact counts.")
    for path in images:
        console.print(f"histogram: {path}", soft_wrap=True)
    packed = "" if args.pack_to is None else f" --packing --seq-length {args.pack_to}"
    packed += f" data.sample_multiple={args.sample_multiple}" if args.sample_multiple > 1 else ""
    data = shlex.quote(str(args.out / BLEND if is_blend else args.out))
    console.print(f"train with --data-path {data}{packed}", soft_wrap=True)
    return 0


def _counting(args: argparse.Namespace) -> Counting | None:
    if args.tokenizer_load_dir is None:
        return None
    from llava_mcore.prepare.shard_plan import Counting

    return Counting(
        args.tokenizer_load_dir,
        args.chat_template,
        args.lang,
        args.special_tokens_in_text,
        pixels_of(args),
        video_pixels_of(args),
    )


def _check(args: argparse.Namespace) -> None:
    """Raise one DataError for flags that contradict each other."""
    from llava_mcore.prepare.listing import is_listing

    errors = []
    listings = [path for path in args.sources if is_listing(Path(path))]
    if listings and len(args.sources) > 1:
        errors.append(f"{listings[0]} lists sources, so it must be the only SRC; add the others to it")
    if listings:
        keys = ("image_key", "video_key", "audio_key", "question_key", "answer_key")
        keys_of_sources = ("format", "image_dir", "source_split", *keys, "captions", "preference_pairs", "frames_fps")
        set_anyway = [name for name in keys_of_sources if getattr(args, name) != parser().get_default(name)]
        errors += [f"--{name.replace('_', '-')} belongs to each source in {listings[0]}" for name in set_anyway]
    needing = {"--pack-to": args.pack_to, "--chat-template": args.chat_template, "--lang": args.lang}
    if args.tokenizer_load_dir is None:
        errors += [f"{flag} needs --tokenizer-load-dir" for flag, value in needing.items() if value is not None]
    if args.sample_multiple > 1 and args.pack_to is None:
        errors.append("--sample-multiple needs --pack-to; other samples are rounded up when training packs them")
    elif args.pack_to is not None and args.pack_to % args.sample_multiple:
        errors.append(f"--pack-to {args.pack_to} is not a multiple of --sample-multiple {args.sample_multiple}")
    if args.preference_pairs and args.pack_to is not None:
        errors.append("--pack-to packs conversations, not --preference-pairs")
    if args.keep_order and args.shuffle_seed != parser().get_default("shuffle_seed"):
        errors.append("--keep-order and --shuffle-seed: choose one of them")
    if args.num_workers < 0:
        errors.append(f"--num-workers is {args.num_workers}; use 0 for this process, or a number of processes")
    if errors:
        raise DataError(problems("prepare cannot start", errors))


def _prepare_one(args: argparse.Namespace, options: Options, console: Console) -> Result:
    from llava_mcore.prepare.record_layouts import Keys
    from llava_mcore.prepare.sources.detect import Opening

    texts = (args.image_key, args.question_key, args.answer_key, args.captions)
    keys = Keys(*texts, args.video_key, args.audio_key, args.preference_pairs)
    opening = Opening(args.format, args.image_dir, args.source_split, keys, frames_fps=args.frames_fps)
    return _prepare(args.sources, opening, args.out, args, options, console)


def _prepare_listed(args: argparse.Namespace, options: Options, console: Console) -> list[Result]:
    from llava_mcore.prepare.journal import Journal
    from llava_mcore.prepare.listing import BLEND, read_listing, write_blend

    listing = read_listing(Path(args.sources[0]))
    root = Path(args.sources[0]).parent
    with Journal(args.out) as journal:
        journal.begin(LISTED, overwrite=args.overwrite)
        (args.out / BLEND).unlink(missing_ok=True)  # so that nothing looks finished in the meantime
        results = [
            _prepare([listed.place(root)], listed.opening(root), args.out / name, args, options, console)
            for name, listed in listing.by_name().items()
        ]
        if all(result.finished for result in results):
            write_blend(args.out, listing, has_val=options.val_ratio > 0)
    return results


def _prepare(
    sources: Sequence[str], opening: Opening, out: Path, args: argparse.Namespace, options: Options, console: Console
) -> Result:
    from llava_mcore.prepare.locate import locate
    from llava_mcore.prepare.prepare_source import prepare

    with PrepareBar(console) as bar:
        keep_order = options.shuffle_seed is None
        located = locate(sources, opening, out, bar, keep_order=keep_order)
        return prepare(
            located,
            out,
            options,
            bar,
            num_workers=args.num_workers,
            max_skip_rate=args.max_skip_rate,
            overwrite=args.overwrite,
        )


main = command_main(parser, run)
