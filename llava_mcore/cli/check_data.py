"""Check a dataset before training: `python -m llava_mcore check --data-path D --tokenizer-load-dir T`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llava_mcore.check_data.examiner import Examiner, Finding
from llava_mcore.check_data.remarks import remarks_on
from llava_mcore.check_data.report import DataReport
from llava_mcore.check_data.scan import Task, choose, scan
from llava_mcore.check_data.show import conversation_text
from llava_mcore.check_data.tables import print_report
from llava_mcore.check_data.tally import DatasetTally, Tally
from llava_mcore.cli.flags.samples import limits_of, pixels_of, video_pixels_of
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.loader.budgets import check_budgets, warnings_of_large_media
from llava_mcore.data.loader.datasets import Dataset
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import ConfigError, DataError

DEFAULTS = DataConfig()
NEEDS_TOKENIZER = "--data-path needs --tokenizer-load-dir, the Hugging Face folder to train with"


def run(args: argparse.Namespace) -> int:
    """Run the check; returns 0 if the data can be used for training, else 2.

    Raises:
        ConfigError: invalid flags.
        DataError: the tokenizer folder cannot be used, or the report cannot be written.
    """
    _check_flags(args)
    assets = load_assets(
        args.tokenizer_load_dir,
        chat_template=args.chat_template,
        lang=args.lang,
        special_tokens_in_text=args.special_tokens_in_text,
        limits=limits_of(args),
        pixels=pixels_of(args),
        video_pixels=video_pixels_of(args),
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # in a file or a pipe; rich would assume 80
    report, examiner = examine(args, assets)
    if examiner is not None:
        _show(examiner, report, assets, console)
    print_report(report, console)
    if args.json is not None:
        _write(args.json, report)
    return 2 if report.reasons_not_to_train else 0


def examine(args: argparse.Namespace, assets: Assets) -> tuple[DataReport, Examiner | None]:
    """Check files and samples; the examiner is None if the data cannot be opened.

    Raises:
        ConfigError: no picture or sound fits into a sample.
    """
    data = DataConfig(seq_length=args.seq_length, max_media_tokens=args.max_media_tokens)
    check_budgets(data, assets)
    stop: list[str] = []
    examiner = None
    try:
        check_dataset(args.data_path)
    except DataError as error:
        stop.append(str(error))
    try:
        examiner = Examiner(args.data_path, assets, seq_length=args.seq_length, max_media_tokens=args.max_media_tokens)
    except DataError as error:
        stop = stop or [str(error)]  # otherwise another message has reported it
    datasets = examiner.datasets if examiner is not None else []
    tally = Tally(
        [DatasetTally(d.path, d.share, d.repeats, len(d.shards), d.num_samples) for d in datasets],
        most_patches=args.max_media_tokens,
    )
    tasks = choose(datasets, full=args.full)
    start = time.perf_counter()
    if examiner is not None:
        _scan(examiner, tasks, tally, args)
    report = DataReport(
        data_path=str(args.data_path),
        tokenizer_dir=str(args.tokenizer_load_dir),
        seq_length=args.seq_length,
        max_media_tokens=args.max_media_tokens,
        unit=assets.plan.unit,
        packing_buffer_size=DEFAULTS.packing_buffer_size,
        max_skip_rate=args.max_skip_rate,
        full=sum(len(indices) for _, indices in tasks) == sum(d.num_samples for d in datasets),
        seconds=time.perf_counter() - start,
        stop=tuple(stop),
        remarks=(*_remarks(datasets), *warnings_of_large_media(data, assets)),
        tally=tally,
        own_text_warning=assets.chat.own_text_warning,
    )
    return report, examiner


def _remarks(datasets: Sequence[Dataset]) -> list[str]:
    folders = dict.fromkeys(Path(data.path) for data in datasets)
    return [remark for folder in folders if folder.is_dir() for remark in remarks_on(folder)]


def _check_flags(args: argparse.Namespace) -> None:
    if args.tokenizer_load_dir is None:
        raise ConfigError(NEEDS_TOKENIZER)
    lowest = {"seq_length": 1, "num_workers": 0, "show": 0, "max_skip_rate": 0}
    wrong = [f"--{name.replace('_', '-')} must be at least {least}" for name, least in lowest.items()
             if vars(args)[name] < least]  # fmt: skip
    if args.max_skip_rate > 1:
        wrong.append("--max-skip-rate is a fraction, from 0 to 1")
    if wrong:
        raise ConfigError("; ".join(wrong))


def _scan(examiner: Examiner, tasks: Sequence[Task], tally: Tally, args: argparse.Namespace) -> None:
    columns = (
        TextColumn("checking samples"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.speed:.0f} samples/s"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with progress:
        bar = progress.add_task("", total=sum(len(indices) for _, indices in tasks))

        def take(finding: Finding) -> None:
            tally.add(finding, num_examples=args.show)
            progress.advance(bar)

        scan(examiner, tasks, num_workers=args.num_workers, on_finding=take)


def _show(examiner: Examiner, report: DataReport, assets: Assets, console: Console) -> None:
    for finding in report.tally.examples:
        tokens = examiner.conversation(finding)
        marked = "colored" if console.is_terminal else "between « and »"
        console.print(
            f"sample {finding.key} of {finding.shard}: {len(tokens)} tokens, {int(tokens.trained.sum())} of them "
            f"trained ({marked})",
            markup=False,
            soft_wrap=True,
        )
        console.print(conversation_text(tokens, assets, colored=console.is_terminal), soft_wrap=True)
        console.print()


def _write(file: Path, report: DataReport) -> None:
    try:
        file.write_text(json.dumps(report.as_json(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"the report cannot be written to {file}: {error.strerror}") from error
