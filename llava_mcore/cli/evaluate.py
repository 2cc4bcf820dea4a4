"""`evaluate`: score models on a dataset and on tasks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_mcore.cli.base.entry import command_main
from llava_mcore.cli.base.shared_flags import (
    BASE_DIR_HELP,
    DTYPE_NAMES,
    SPLITS,
    add_answer_flags,
    add_layout_flags,
    positive,
    reading_of,
    sampling_of,
)
from llava_mcore.errors import ConfigError, LlavaMcoreError, problems

if TYPE_CHECKING:
    from llava_mcore.inference.answering.evaluation import EvaluationReport
    from llava_mcore.inference.answering.job import Job, Layout, ReadOptions
    from llava_mcore.inference.evaluation.tasks import TaskSettings
    from llava_mcore.inference.generation.settings import TokenSampling

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: "auto"}


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore evaluate`; None: not given. `with_defaults` sets the defaults."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore evaluate",
        usage="%(prog)s (--hf-dir DIR | --megatron-dir DIR) … (--data-path DIR | --tasks NAMES) [FLAG …]",
        allow_abbrev=False,
        description="Score models: on a dataset (exact match, ANLS, ROUGE, BLEU, CIDEr), lm-eval and lmms-eval.",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write all scores, and every answer with its scores")
    # Who is asked; both kinds of folders may be compared.
    models = p.add_argument_group("models; both flags may be repeated")
    models.add_argument("--hf-dir", type=Path, action="append", default=[], help="Hugging Face folder")
    models.add_argument("--megatron-dir", type=Path, action="append", default=[], help="Megatron checkpoint; no tasks")
    models.add_argument("--base-dir", type=Path, metavar="DIR", help=BASE_DIR_HELP)
    add_layout_flags(models, replicas=True)
    models.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype in memory (default: that of config.json)")
    batch_help = "questions that a Megatron checkpoint or lm-eval answers at the same time (default 1)"
    models.add_argument("--batch-size", type=positive, metavar="N", help=batch_help)
    # What is asked: a dataset, or tasks of other programs.
    data = p.add_argument_group("a dataset")
    data.add_argument("--data-path", help="prepared folder or a blend's .yaml")
    data.add_argument("--split", choices=SPLITS, help="split (default val)")
    data.add_argument(
        "--every-answer", action="store_const", const=True,
        help="ask every question of a conversation, after the true earlier answers (default: only the last one)",
    )  # fmt: skip
    tasks = p.add_argument_group("tasks, for Hugging Face folders; task files can execute code")
    tasks.add_argument("--tasks", type=_names, default=(), metavar="NAME[,NAME]", help="tasks of lm-eval")
    tasks.add_argument("--lmms-tasks", type=_names, default=(), metavar="NAME[,NAME]", help="tasks of lmms-eval")
    tasks.add_argument("--lmms-python", type=Path, metavar="PYTHON", help="Python of an environment with lmms-eval")
    tasks.add_argument(
        "--include-path", type=Path, action="append", default=[], metavar="DIR",
        help="folder with task files of your own; may be repeated",
    )  # fmt: skip
    p.add_argument(
        "--num-samples", type=positive, metavar="N",
        help="ask N questions of the dataset, evenly distributed, and the first N of each task (default: all)",
    )  # fmt: skip
    add_answer_flags(p, "answers to the dataset's questions")
    p.set_defaults(**dict.fromkeys(answer_defaults()))
    return p


def answer_defaults() -> dict[str, Any]:
    """Return the flags that only --data-path reads, with their defaults."""
    defaults_parser = argparse.ArgumentParser()
    add_answer_flags(defaults_parser)
    return {"split": "val", "every_answer": False} | vars(defaults_parser.parse_args([]))


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags with the defaults of those that were not given."""
    defaults = answer_defaults() | {"tp": 1, "cp": 1, "pp": 1, "replicas": 1, "batch_size": 1}
    absent = {name: value for name, value in defaults.items() if vars(args)[name] is None}
    return argparse.Namespace(**(vars(args) | absent))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def run(args: argparse.Namespace) -> int:
    """Score; returns 0. What is finished is printed and written even if a later part fails."""
    from llava_mcore.inference.answering.evaluation import EvaluationReport, score_records
    from llava_mcore.inference.answering.megatron_answers import answer_checkpoint

    typed, args = args, with_defaults(args)
    check_flags(args, typed)
    report = EvaluationReport(args.json)
    try:
        for folder in args.hf_dir:
            report.begin(folder)
            _ask_folder(report, folder, args)
        for folder in args.megatron_dir:
            report.begin(folder)
            answers = answer_checkpoint(folder, _job(args), layout_of(args), base_dir_of(args, folder))
            report.add(data=score_records(answers))
    finally:
        report.show()
    return 0


def _ask_folder(report: EvaluationReport, hf_dir: Path, args: argparse.Namespace) -> None:
    from llava_mcore.inference.answering.evaluation import score_records
    from llava_mcore.inference.answering.lmms_harness import run_lmms_tasks
    from llava_mcore.inference.answering.transformers_answers import answer_folder
    from llava_mcore.inference.evaluation.lm_harness import run_tasks
    from llava_mcore.models.architectures.hf_config import load_hf_config

    if args.data_path is not None:
        report.add(data=score_records(answer_folder(hf_dir, _job(args))))
    if args.tasks:
        max_length = int(load_hf_config(hf_dir).get_text_config().max_position_embeddings)
        settings = task_settings(args, args.tasks)
        report.add(tasks=run_tasks(hf_dir, max_length, TORCH_NAMES[args.dtype], settings))
    if args.lmms_tasks:
        for task in run_lmms_tasks(hf_dir, args.lmms_python, task_settings(args, args.lmms_tasks)):
            report.add(tasks=[task])


def _job(args: argparse.Namespace) -> Job:
    from llava_mcore.inference.answering.job import DataJob, Job

    asked = DataJob(data_of(args), args.split, args.num_samples, args.every_answer)
    return Job(asked, reading_of(args), sampling_of(args), args.max_new_tokens, args.dtype)


def check_flags(args: argparse.Namespace, typed: argparse.Namespace) -> None:
    """Raise one error with everything that cannot work: a wrong path would otherwise end a run of hours.

    Args:
        args: with the defaults of flags that were not given.
        typed: in which these are None.
    """
    from llava_mcore.inference.evaluation.languages import require_libraries
    from llava_mcore.inference.evaluation.lm_harness import require_data

    errors = [*_missing(args), *_without_effect(typed), *_wrong_file(args.json)]
    errors += _said(require_libraries)
    errors += [text for problem in (_tasks(args), _dataset(args), _models(args)) for text in problem]
    if args.tasks and not errors:  # it may download a lot
        errors += _said(lambda: require_data(task_settings(args, args.tasks)))
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        raise ConfigError(problems("nothing was evaluated", errors))


def data_of(args: argparse.Namespace) -> Path | str:
    """Return the path of the dataset."""
    return str(args.data_path) if "://" in args.data_path else Path(args.data_path)


def layout_of(args: argparse.Namespace) -> Layout:
    """Return how a Megatron checkpoint is divided."""
    from llava_mcore.inference.answering.job import Layout

    return Layout(args.tp, args.pp, args.batch_size, cp=args.cp, replicas=args.replicas)


def base_dir_of(args: argparse.Namespace, folder: Path) -> Path | None:
    """Return --base-dir for an adapter's checkpoint, None for others. CheckpointError for a missing checkpoint."""
    from llava_mcore.adapters.adapter_record import holds_adapters, read_base
    from llava_mcore.checkpoint.layout import newest_iteration

    checkpoint = newest_iteration(folder)
    return read_base(checkpoint).base_dir(args.base_dir) if holds_adapters(checkpoint) else None


def task_settings(args: argparse.Namespace, names: tuple[str, ...]) -> TaskSettings:
    """Return what is asked of a harness."""
    from llava_mcore.inference.evaluation.tasks import TaskSettings

    return TaskSettings(names, tuple(args.include_path), args.num_samples, args.batch_size)


def _missing(args: argparse.Namespace) -> Iterator[str]:
    tasks = args.tasks or args.lmms_tasks
    if not args.hf_dir and not args.megatron_dir:
        yield "give a model: --hf-dir or --megatron-dir"
    if args.data_path is None and not tasks:
        yield "give --data-path, --tasks or --lmms-tasks"
    if tasks and args.megatron_dir and (args.data_path is None or not args.hf_dir):
        yield "tasks are for --hf-dir: run export-hf first"
    if bool(args.lmms_tasks) != (args.lmms_python is not None):
        yield "--lmms-tasks and --lmms-python need each other"
    if args.include_path and not tasks:
        yield "--include-path needs --tasks or --lmms-tasks"


def _without_effect(typed: argparse.Namespace) -> Iterator[str]:
    """Name the flags that nothing would read."""
    names = [name for name in answer_defaults() if vars(typed)[name] is not None]
    if typed.data_path is None and names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        yield f"{flags}: only for --data-path; tasks have settings of their own"
    if typed.dtype is not None and typed.data_path is None and not typed.tasks:
        yield "--dtype: only for --data-path and --tasks; the server of --lmms-tasks takes that of config.json"
    if typed.batch_size is not None and not typed.megatron_dir and not typed.tasks:
        yield "--batch-size: only for --megatron-dir and --tasks"
    for flag, value in (("--base-dir", typed.base_dir), ("--replicas", typed.replicas)):
        if value is not None and not typed.megatron_dir:
            yield f"{flag}: only for --megatron-dir"
    if not typed.megatron_dir and any(x is not None for x in (typed.tp, typed.cp, typed.pp)):
        yield "--tp, --cp and --pp: only for --megatron-dir; transformers runs a Hugging Face folder in one process"


def _wrong_file(path: Path | None) -> Iterator[str]:
    if path is not None and not path.parent.is_dir():
        yield f"--json {path}: there is no folder {path.parent}; create it first"
    if path is not None and path.is_dir():
        yield f"--json {path} is a folder: give the name of a file in it"


def _tasks(args: argparse.Namespace) -> Iterator[str]:
    from llava_mcore.inference.answering.lmms_harness import require_lmms
    from llava_mcore.inference.evaluation.lm_harness import find_tasks

    if args.tasks:
        yield from _said(lambda: find_tasks(task_settings(args, args.tasks)))
    elif args.include_path:
        yield from _said(task_settings(args, args.lmms_tasks).check_folders)
    if args.lmms_python is not None:
        yield from _said(lambda: require_lmms(args.lmms_python))


def _dataset(args: argparse.Namespace) -> Iterator[str]:
    if args.data_path is not None:
        from llava_mcore.data.storage.dataset_path import check_dataset

        yield from _said(lambda: check_dataset(data_of(args), args.split))


def _models(args: argparse.Namespace) -> Iterator[str]:
    from llava_mcore.adapters.adapter_record import holds_adapters
    from llava_mcore.checkpoint.layout import newest_iteration
    from llava_mcore.inference.answering.job import ReadOptions
    from llava_mcore.inference.generation.settings import TokenSampling

    reading, sampling = ReadOptions(), TokenSampling()
    if args.data_path is not None:
        wrong = [*_said(lambda: reading_of(args)), *_said(lambda: sampling_of(args))]
        yield from wrong
        if not wrong:  # otherwise the folders are checked with what is right for any of them
            reading, sampling = reading_of(args), sampling_of(args)
    for folder in args.hf_dir:
        yield from _hf_folder(folder, reading, by_others=bool(args.tasks or args.lmms_tasks))
    wrong = [x for folder in args.megatron_dir for x in _said(partial(_checkpoint, args, folder, reading, sampling))]
    yield from wrong
    if wrong or args.base_dir is None:
        return
    if not any(holds_adapters(newest_iteration(folder)) for folder in args.megatron_dir):
        yield "--base-dir has no effect: no checkpoint holds an adapter; omit it"


def _hf_folder(folder: Path, reading: ReadOptions, *, by_others: bool) -> list[str]:
    """Return problems with a folder. `by_others`: harnesses load it too."""
    from llava_mcore.models.whole_folder import open_whole_folder

    if not folder.is_dir():
        return [f"--hf-dir {folder}: there is no such folder"]
    return [
        *_said(lambda: reading.assets(folder)),
        *_said(lambda: open_whole_folder(folder, with_our_config=not by_others)),
    ]


def _checkpoint(args: argparse.Namespace, folder: Path, reading: ReadOptions, sampling: TokenSampling) -> None:
    from llava_mcore.checkpoint.layout import hf_folder
    from llava_mcore.inference.answering.megatron_answers import usable_checkpoint
    from llava_mcore.inference.generation.settings import read_settings, require_known
    from llava_mcore.models.architectures.hf_config import load_hf_config

    hf_dir = hf_folder(usable_checkpoint(folder, layout_of(args), base_dir_of(args, folder)))
    reading.assets(hf_dir)
    require_known(read_settings(hf_dir, load_hf_config(hf_dir), None, max_new_tokens=1, sampling=sampling), hf_dir)


def _said(check_one: Callable[[], object]) -> list[str]:
    """Run a check and return its message, if it has one."""
    try:
        check_one()
    except LlavaMcoreError as error:
        return [str(error)]
    return []


main = command_main(parser, run)
