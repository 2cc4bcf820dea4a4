"""Users' conversations and pictures -> energon shards, ready for --data-path. Needs no GPU."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

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

from llava_mcore.cli.common import conversion_main
from llava_mcore.cli.flags.prepare import parser
from llava_mcore.cli.flags.samples import limits_of, pixels_of, video_pixels_of
from llava_mcore.errors import DataError, problems
from llava_mcore.prepare.journal import Journal
from llava_mcore.prepare.listing import BLEND, is_listing, read_listing, write_blend
from llava_mcore.prepare.prepare_source import Result, prepare
from llava_mcore.prepare.record_layouts import Keys
from llava_mcore.prepare.sampling import Sampling
from llava_mcore.prepare.shard_plan import Counting, Options, SourcePaths
from llava_mcore.prepare.sources.detect import Opening
from llava_mcore.prepare.summary import draw, failures, show

LISTED = {"sources": [], "options": {"SRC": "a list of sources"}}
"""Marker in the folder of a blend: the list may change, because each source is checked separately."""


def run(args: argparse.Namespace) -> int:
    """Prepare the data and print the summary. Returns 2 if too many rows were skipped."""
    options = Options(
        rows_per_shard=args.samples_per_shard,
        val_ratio=args.val_ratio,
        counting=_counting(args),
        pack_to=args.pack_to,
        check_images=args.check_images,
        sampling=Sampling(args.video_fps, args.video_max_frames),
        limits=limits_of(args),
    )
    _check(args)
    console = Console()
    is_blend = is_listing(args.sources[0])
    try:
        results = _prepare_listed(args, options, console) if is_blend else [_prepare_one(args, options, console)]
    except OSError as error:
        hint = "fix the disk and run the command again, which keeps finished shards; or choose another --out"
        raise DataError(f"--out {args.out} cannot be written: {error}; {hint}") from error
    show(console, results)
    pictures = [path for result in results if result.counts.conversations for path in draw(result)]
    failed = failures(results, args.max_skip_rate)
    if failed:
        raise DataError(problems("the data was not completed", failed))
    if options.counting is None:
        console.print("Tokens were not counted: give --tokenizer-load-dir for exact counts.")
    for path in pictures:
        console.print(f"histogram: {path}", soft_wrap=True)
    packed = "" if args.pack_to is None else f" --packing --seq-length {args.pack_to}"
    data = shlex.quote(str(args.out / BLEND if is_blend else args.out))
    console.print(f"train with --data-path {data}{packed}", soft_wrap=True)
    return 0


def _counting(args: argparse.Namespace) -> Counting | None:
    if args.tokenizer_load_dir is None:
        return None
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
    errors = []
    listings = [path for path in args.sources if is_listing(path)]
    if listings and len(args.sources) > 1:
        errors.append(f"{listings[0]} lists sources, so it must be the only SRC; add the others to it")
    if listings:
        keys = ("image_key", "video_key", "audio_key", "question_key", "answer_key")
        keys_of_sources = ("format", "image_dir", "source_split", *keys, "captions", "frames_fps")
        set_anyway = [name for name in keys_of_sources if getattr(args, name) != parser().get_default(name)]
        errors += [f"--{name.replace('_', '-')} belongs to each source in {listings[0]}" for name in set_anyway]
    needing = {"--pack-to": args.pack_to, "--chat-template": args.chat_template, "--lang": args.lang}
    if args.tokenizer_load_dir is None:
        errors += [f"{flag} needs --tokenizer-load-dir" for flag, value in needing.items() if value is not None]
    if args.num_workers < 0:
        errors.append(f"--num-workers is {args.num_workers}; use 0 for this process, or a number of processes")
    if errors:
        raise DataError(problems("prepare cannot start", errors))


def _prepare_one(args: argparse.Namespace, options: Options, console: Console) -> Result:
    keys = Keys(args.image_key, args.question_key, args.answer_key, args.captions, args.video_key, args.audio_key)
    opening = Opening(args.format, args.image_dir, args.source_split, keys, frames_fps=args.frames_fps)
    source = SourcePaths(tuple(args.sources), opening)
    return _prepare(source, args.out, args, options, console)


def _prepare_listed(args: argparse.Namespace, options: Options, console: Console) -> list[Result]:
    listing = read_listing(args.sources[0])
    root = args.sources[0].parent
    with Journal(args.out) as journal:
        journal.begin(LISTED, overwrite=args.overwrite)
        (args.out / BLEND).unlink(missing_ok=True)  # so that nothing looks finished in the meantime
        results = [
            _prepare(listed.source(root), args.out / name, args, options, console)
            for name, listed in listing.by_name().items()
        ]
        if all(result.finished for result in results):
            write_blend(args.out, listing, has_val=options.val_ratio > 0)
    return results


def _prepare(source: SourcePaths, out: Path, args: argparse.Namespace, options: Options, console: Console) -> Result:
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

    def begin(self, activity: str, total: int | None) -> None:
        """Start showing a new step."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(activity, total=total, rate="")

    def advance(self, count: int) -> None:
        """Advance the bar."""
        assert self._task is not None
        self._progress.update(self._task, advance=count)
        speed = self._progress.tasks[-1].speed
        self._progress.update(self._task, rate="" if speed is None else f"{speed:,.0f}/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
