"""`check --data-path`: the check of a dataset, with progress, report and examples on the console."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.energon.epathlib import EPath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llava_mcore.check_data.examiner import Examiner
from llava_mcore.check_data.finding import Finding
from llava_mcore.check_data.remarks import remarks_on
from llava_mcore.check_data.report import DataReport
from llava_mcore.check_data.scan import Task, choose, find, scan
from llava_mcore.check_data.show import conversation_text
from llava_mcore.check_data.tables import print_report
from llava_mcore.check_data.tally import DatasetTally, Tally
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.budgets import check_budgets, warnings_of_large_media
from llava_mcore.data.loader.datasets import Dataset
from llava_mcore.data.samples import TokenConversation
from llava_mcore.data.storage.dataset_path import check_dataset, has_pairs
from llava_mcore.errors import DataError

DEFAULTS = DataConfig()


@dataclass(frozen=True)
class DataCheck:
    """A dataset and how to check it: the flags of `check`."""

    data_path: Path
    tokenizer_dir: Path
    seq_length: int
    max_media_tokens: int | None
    max_skip_rate: float
    full: bool
    num_workers: int
    num_examples: int
    key: str | None
    """Show this sample instead of checking the dataset."""
    json_file: Path | None
    sample_multiple: int = 1


def check_data(check: DataCheck, assets: Assets) -> int:
    """Run the check; returns 0 if the data can be used for training, else 2.

    Raises:
        ConfigError: no image or audio clip fits into a sample.
        DataError: the report cannot be written.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # in a file or a pipe; rich would assume 80
    if check.key is not None:
        return _show_one(check, check.key, assets, console)
    report, examiner = examine(check, assets)
    if examiner is not None:
        _show(examiner, report, assets, console)
    print_report(report, console)
    if check.json_file is not None:
        _write(check.json_file, report)
    return 2 if report.reasons_not_to_train else 0


def examine(check: DataCheck, assets: Assets) -> tuple[DataReport, Examiner | None]:
    """Check files and samples; the examiner is None if the data cannot be opened.

    Raises:
        ConfigError: no image or audio clip fits into a sample.
    """
    data = DataConfig(seq_length=check.seq_length, max_media_tokens=check.max_media_tokens)
    check_budgets(data, assets)
    # Problems of the files are reported together with those of the samples that can be read.
    stop: list[str] = []
    examiner = None
    paired = False
    try:
        paired = any(map(_has_pairs, check_dataset(check.data_path, takes_pairs=True)))
    except DataError as error:
        stop.append(str(error))
    try:
        examiner = _examiner(check, assets)
    except DataError as error:
        stop = stop or [str(error)]  # otherwise another message has reported it
    # Every shard is looked at; with --full, every sample.
    datasets = examiner.datasets if examiner is not None else []
    tally = Tally(
        [DatasetTally(d.path, d.share, d.repeats, len(d.shards), d.num_samples) for d in datasets],
        most_patches=check.max_media_tokens,
    )
    tasks = choose(datasets, full=check.full)
    start = time.perf_counter()
    if examiner is not None:
        _scan(examiner, tasks, tally, check)
    # The report says whether all samples were checked: shares are estimates otherwise.
    report = DataReport(
        data_path=str(check.data_path),
        tokenizer_dir=str(check.tokenizer_dir),
        seq_length=check.seq_length,
        max_media_tokens=check.max_media_tokens,
        unit=assets.plan.unit,
        packing_buffer_size=DEFAULTS.packing_buffer_size,
        sample_multiple=check.sample_multiple,
        max_skip_rate=check.max_skip_rate,
        full=sum(len(indices) for _, indices in tasks) == sum(d.num_samples for d in datasets),
        seconds=time.perf_counter() - start,
        stop=tuple(stop),
        remarks=(*_remarks(datasets), *warnings_of_large_media(data, assets)),
        tally=tally,
        own_text_warning=assets.chat.own_text_warning,
        has_pairs=paired,
    )
    return report, examiner


def _examiner(check: DataCheck, assets: Assets) -> Examiner:
    return Examiner(
        check.data_path,
        assets,
        seq_length=check.seq_length,
        max_media_tokens=check.max_media_tokens,
        sample_multiple=check.sample_multiple,
    )


def _has_pairs(dataset: Path | EPath) -> bool:
    return has_pairs(dataset if isinstance(dataset, EPath) else EPath(dataset))


def _remarks(datasets: Sequence[Dataset]) -> list[str]:
    folders = dict.fromkeys(Path(data.path) for data in datasets)
    return [remark for folder in folders if folder.is_dir() for remark in remarks_on(folder)]


def _scan(examiner: Examiner, tasks: Sequence[Task], tally: Tally, check: DataCheck) -> None:
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
            tally.add(finding, num_examples=check.num_examples)
            progress.advance(bar)

        scan(examiner, tasks, num_workers=check.num_workers, on_finding=take)


def _show(examiner: Examiner, report: DataReport, assets: Assets, console: Console) -> None:
    for finding in report.tally.examples:
        conversations = examiner.conversations(finding)
        for tokens in conversations if report.has_pairs else conversations[:1]:
            _show_conversation(finding, tokens, assets, console)


def _show_one(check: DataCheck, key: str, assets: Assets, console: Console) -> int:
    """Print every conversation of one sample; returns 0 if training uses it, else 2."""
    check_dataset(check.data_path, takes_pairs=True)
    examiner = _examiner(check, assets)
    finding = examiner.examine(*find(examiner.datasets, key))
    if finding.status == "used":
        for tokens in examiner.conversations(finding):
            _show_conversation(finding, tokens, assets, console)
    is_trained_on = finding.status == "used" and not finding.reasons
    title = "trained on" if is_trained_on else "excluded by split.yaml" if finding.status == "excluded" else "left out"
    for line in (f"sample {finding.key} of {finding.shard}: {title}", *finding.reasons, *finding.remarks):
        console.print(line, markup=False, soft_wrap=True)
    return 0 if is_trained_on else 2


def _show_conversation(finding: Finding, tokens: TokenConversation, assets: Assets, console: Console) -> None:
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
