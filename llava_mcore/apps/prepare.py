"""Users' conversations and pictures -> energon shards, ready for --data-path. Needs no GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from llava_mcore.apps.cli import conversion_main
from llava_mcore.apps.data_flags import add_sample_flags, limits_of
from llava_mcore.data.prepare.journal import Journal
from llava_mcore.data.prepare.layouts import Keys
from llava_mcore.data.prepare.listing import BLEND, is_listing, read_listing, write_blend
from llava_mcore.data.prepare.plan import Counting, Options, Source
from llava_mcore.data.prepare.run import Result, prepare
from llava_mcore.data.prepare.sources.detect import FORMATS, Opening
from llava_mcore.data.prepare.summary import draw, failures, show
from llava_mcore.data.template_choice import Lang
from llava_mcore.errors import DataError, problems

EPILOG = """\
formats (told from what is found, or set with --format):
  llava         .json list or .jsonl with "conversations" [{"from": "human", "value": "<image>\\n…"}, …] and "image"
  sharegpt      .json list or .jsonl with "messages" [{"role": "user", "content": "…"}, …] and "images"
  openai        the same, "content" in typed parts: text, image_url with a path, a file:// or a data: URI
  parquet, huggingface
                .parquet files, a folder of them, or what `datasets` saves; pictures as struct{bytes, path}, bytes or
                path; conversations, messages, texts or question/answer columns
  vqa           a folder or tar files of NNN.jpg, NNN.txt (answer) and NNN.json ({"question": …})
  a .yaml file  lists several sources with weights or epochs; each becomes a folder of its own, and DIR/blend.yaml
                is the --data-path

The same command again continues where it was interrupted. docs/prepare.md tells more.
exit codes: 0 finished; 2 wrong input, or more than --max-skip-rate of the rows skipped
"""

LISTED = {"sources": [], "options": {"SRC": "a list of sources"}}
"""What the folder of a blend is begun with: the list itself may change, its sources are checked one by one."""


def parser() -> argparse.ArgumentParser:
    """Flags of `prepare`."""
    p = argparse.ArgumentParser(
        prog="prepare.py",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write energon shards with their index from conversations in any usual format. Broken rows are "
        "skipped, listed\nand counted.",
        epilog=EPILOG,
    )
    p.add_argument("sources", nargs="+", type=Path, metavar="SRC", help="files or folders, or a .yaml that lists some")
    p.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="what to write: new, or begun by this command"
    )
    p.add_argument("--format", choices=FORMATS, default="auto", help="what the sources are (default: auto)")
    p.add_argument("--image-dir", type=Path, help="relative picture paths begin here (default: beside the source file)")
    p.add_argument("--source-split", default="train", help="part of a Hugging Face dataset to take (default: train)")
    p.add_argument("--image-key", help="field with the pictures (default: image or images)")
    p.add_argument("--question-key", help="field with the question (default: question)")
    p.add_argument("--answer-key", help="field with the answer (default: answer, or the first of answers)")
    p.add_argument("--captions", action="store_true", help="answers have no question; the picture stands for it")
    p.add_argument(
        "--tokenizer-load-dir",
        type=Path,
        metavar="T",
        help="count tokens as training with this folder does",
    )
    p.add_argument("--chat-template", help="template to count with, a name or a .jinja file (default: that of T)")
    p.add_argument("--lang", choices=get_args(Lang), help="picks the template if T has none")
    p.add_argument("--pack-to", type=_positive, metavar="N", help="pack conversations offline into samples of N tokens")
    p.add_argument("--samples-per-shard", type=_positive, default=1000, metavar="N", help="source rows (default 1000)")
    p.add_argument("--val-ratio", type=_ratio, default=0.0, metavar="R", help="part of the shards for validation (0)")
    p.add_argument("--check-images", action="store_true", help="decode every picture (default: read its header)")
    add_sample_flags(p)
    p.add_argument("--max-skip-rate", type=_ratio, default=0.01, metavar="R", help="allowed skips (default 0.01)")
    p.add_argument("--num-workers", type=int, default=_num_cpus(), metavar="N", help="processes (default: all cores)")
    p.add_argument("--overwrite", action="store_true", help="start anew in a folder that this command has written")
    return p


def run(args: argparse.Namespace) -> int:
    """Prepare as the flags say; print the summary. Returns 2 if too many rows were skipped."""
    options = Options(
        rows_per_shard=args.samples_per_shard,
        val_ratio=args.val_ratio,
        counting=_counting(args),
        pack_to=args.pack_to,
        check_images=args.check_images,
        limits=limits_of(args),
    )
    _check(args)
    console = Console()
    is_blend = is_listing(args.sources[0])
    try:
        results = _prepare_listed(args, options, console) if is_blend else [_prepare_one(args, options, console)]
    except OSError as error:
        hint = "see to the disk and begin again, finished shards are kept; or choose another --out"
        raise DataError(f"--out {args.out} cannot be written: {error}; {hint}") from error
    show(console, results)
    pictures = [path for result in results if result.counts.conversations for path in draw(result)]
    failed = failures(results, args.max_skip_rate)
    if failed:
        raise DataError(problems("the data were not finished", failed))
    if options.counting is None:
        console.print("Tokens were not counted: give --tokenizer-load-dir for exact counts.")
    for path in pictures:
        console.print(f"histogram: {path}", soft_wrap=True)
    packed = "" if args.pack_to is None else f" --packing --seq-length {args.pack_to}"
    console.print(f"train with --data-path {args.out / BLEND if is_blend else args.out}{packed}", soft_wrap=True)
    return 0


def _counting(args: argparse.Namespace) -> Counting | None:
    if args.tokenizer_load_dir is None:
        return None
    return Counting(args.tokenizer_load_dir, args.chat_template, args.lang, args.special_tokens_in_text)


def _check(args: argparse.Namespace) -> None:
    """Raise one DataError for flags that do not go together."""
    found = []
    listings = [path for path in args.sources if is_listing(path)]
    if listings and len(args.sources) > 1:
        found.append(f"{listings[0]} lists sources, so it must be the only SRC; add the others to it")
    if listings:
        own = ("format", "image_dir", "source_split", "image_key", "question_key", "answer_key", "captions")
        set_anyway = [name for name in own if getattr(args, name) != parser().get_default(name)]
        found += [f"--{name.replace('_', '-')} belongs to each source in {listings[0]}" for name in set_anyway]
    needing = {"--pack-to": args.pack_to, "--chat-template": args.chat_template, "--lang": args.lang}
    if args.tokenizer_load_dir is None:
        found += [f"{flag} needs --tokenizer-load-dir" for flag, value in needing.items() if value is not None]
    if args.num_workers < 0:
        found.append(f"--num-workers is {args.num_workers}; 0 works in this process, N in N others")
    if found:
        raise DataError(problems("prepare cannot start", found))


def _prepare_one(args: argparse.Namespace, options: Options, console: Console) -> Result:
    keys = Keys(args.image_key, args.question_key, args.answer_key, args.captions)
    source = Source(tuple(args.sources), Opening(args.format, args.image_dir, args.source_split, keys))
    return _prepare(source, args.out, args, options, console)


def _prepare_listed(args: argparse.Namespace, options: Options, console: Console) -> list[Result]:
    listing = read_listing(args.sources[0])
    root = args.sources[0].parent
    with Journal(args.out) as journal:
        journal.begin(LISTED, overwrite=args.overwrite)
        (args.out / BLEND).unlink(missing_ok=True)  # so that nothing looks finished meanwhile
        results = [
            _prepare(listed.source(root), args.out / name, args, options, console)
            for name, listed in listing.by_name().items()
        ]
        if all(result.finished for result in results):
            write_blend(args.out, listing, has_val=options.val_ratio > 0)
    return results


def _prepare(source: Source, out: Path, args: argparse.Namespace, options: Options, console: Console) -> Result:
    with _Bar(console) as bar:
        return prepare(
            source,
            out,
            options,
            bar,
            num_workers=args.num_workers,
            max_skip_rate=args.max_skip_rate,
            overwrite=args.overwrite,
        )


class _Bar:
    """A line with bar, rate and remaining time."""

    def __init__(self, console: Console) -> None:
        rate, columns = TextColumn("{task.fields[rate]}"), (BarColumn(), MofNCompleteColumn())
        text = TextColumn("{task.description}")
        self._progress = Progress(SpinnerColumn(), text, *columns, rate, TimeRemainingColumn(), console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Show a new step instead of the one before."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total, rate="")

    def advance(self, number: int) -> None:
        """Move on."""
        assert self._task is not None
        self._progress.update(self._task, advance=number)
        speed = self._progress.tasks[-1].speed
        self._progress.update(self._task, rate="" if speed is None else f"{speed:,.0f}/s")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
