"""Checks of `evaluate` before it loads a model: a wrong path would otherwise end a run of hours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from llava_mcore.adapters.adapter_record import holds_adapters, read_base
from llava_mcore.checkpoint.layout import hf_folder, newest_iteration
from llava_mcore.cli.flags.evaluate import answer_defaults
from llava_mcore.cli.generate import reading_of, sampling_of
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import ConfigError, LlavaMcoreError, problems
from llava_mcore.inference.answering.job import Layout, ReadOptions
from llava_mcore.inference.answering.lmms_harness import require_lmms
from llava_mcore.inference.answering.megatron_answers import usable_checkpoint
from llava_mcore.inference.evaluation.languages import require_libraries
from llava_mcore.inference.evaluation.lm_harness import find_tasks, require_data
from llava_mcore.inference.evaluation.tasks import TaskSettings
from llava_mcore.inference.generation.settings import TokenSampling, read_settings, require_known
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.whole_folder import open_whole_folder


def check(args: argparse.Namespace, typed: argparse.Namespace) -> None:
    """Raise one error with everything that cannot work.

    Args:
        args: with the defaults of flags that were not given.
        typed: in which these are None.
    """
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
    return Layout(args.tp, args.pp, args.batch_size)


def base_dir_of(args: argparse.Namespace, folder: Path) -> Path | None:
    """Return --base-dir for an adapter's checkpoint. Whole models, and adapters on other weights, may be scored beside
    it. CheckpointError for a missing checkpoint."""
    checkpoint = newest_iteration(folder)
    return read_base(checkpoint).base_dir(args.base_dir) if holds_adapters(checkpoint) else None


def task_settings(args: argparse.Namespace, names: tuple[str, ...]) -> TaskSettings:
    """Return what is asked of a harness."""
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
    if typed.base_dir is not None and not typed.megatron_dir:
        yield "--base-dir: only for --megatron-dir"
    if (typed.tp is not None or typed.pp is not None) and not typed.megatron_dir:
        yield "--tp and --pp: only for --megatron-dir; transformers runs a Hugging Face folder in one process"


def _wrong_file(path: Path | None) -> Iterator[str]:
    if path is not None and not path.parent.is_dir():
        yield f"--json {path}: there is no folder {path.parent}; create it first"
    if path is not None and path.is_dir():
        yield f"--json {path} is a folder: give the name of a file in it"


def _tasks(args: argparse.Namespace) -> Iterator[str]:
    if args.tasks:
        yield from _said(lambda: find_tasks(task_settings(args, args.tasks)))
    elif args.include_path:
        yield from _said(task_settings(args, args.lmms_tasks).check_folders)
    if args.lmms_python is not None:
        yield from _said(lambda: require_lmms(args.lmms_python))


def _dataset(args: argparse.Namespace) -> Iterator[str]:
    if args.data_path is not None:
        yield from _said(lambda: check_dataset(data_of(args), args.split))


def _models(args: argparse.Namespace) -> Iterator[str]:
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
    if not folder.is_dir():
        return [f"--hf-dir {folder}: there is no such folder"]
    return [
        *_said(lambda: reading.assets(folder)),
        *_said(lambda: open_whole_folder(folder, with_our_config=not by_others)),
    ]


def _checkpoint(args: argparse.Namespace, folder: Path, reading: ReadOptions, sampling: TokenSampling) -> None:
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
