"""Score models on a dataset and on tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from llava_mcore.answering.evaluation import ModelResult, as_json, score_records, table
from llava_mcore.answering.hf_folder import answer_folder
from llava_mcore.answering.job import DataJob, Job
from llava_mcore.answering.lmms_harness import require_lmms, run_lmms_tasks
from llava_mcore.answering.megatron import Layout, answer_checkpoint
from llava_mcore.cli.common import conversion_main
from llava_mcore.cli.flags.evaluate import parser
from llava_mcore.cli.generate import reading_of, sampling_of
from llava_mcore.data.encoding.assets import load_assets
from llava_mcore.errors import ConfigError
from llava_mcore.evaluation.libraries import require_libraries
from llava_mcore.evaluation.lm_harness import find_tasks, run_tasks
from llava_mcore.evaluation.tasks import TaskResult, TaskSettings
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.files.text_files import naming
from llava_mcore.models.architectures.hf_config import load_hf_config

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: "auto"}
WIDTH = 160
"""Of the table where there is no terminal."""


def run(args: argparse.Namespace) -> int:
    """Score; returns 0."""
    _check(args)
    results = []
    for hf_dir in args.hf_dir:
        result = ModelResult(str(hf_dir))
        if args.data_path is not None:
            result = replace(result, data=score_records(answer_folder(hf_dir, _job(args))))
        results.append(replace(result, tasks=_tasks(args, hf_dir)))
    for folder in args.megatron_dir:
        records = answer_checkpoint(folder, _job(args), Layout(args.tp, args.pp, args.batch_size))
        results.append(ModelResult(str(folder), score_records(records)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table(results))
    for result in results:
        if result.data is not None and result.data.num_skipped:
            print(f"{result.model}: {result.data.num_skipped} questions could not be asked and are not scored (--json)")
    if args.json is not None:
        _write(args.json, results)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise an error with what cannot work, before a model is loaded."""
    found = []
    if not args.hf_dir and not args.megatron_dir:
        found.append("give a model: --hf-dir or --megatron-dir")
    if args.data_path is None and not args.tasks and not args.lmms_tasks:
        found.append("give --data-path, --tasks or --lmms-tasks")
    if args.megatron_dir and args.data_path is None:
        found.append("tasks are for --hf-dir: run export-hf first")
    if bool(args.lmms_tasks) != (args.lmms_python is not None):
        found.append("--lmms-tasks and --lmms-python need each other")
    if args.include_path and not args.tasks and not args.lmms_tasks:
        found.append("--include-path needs --tasks or --lmms-tasks")
    if args.json is not None and not args.json.parent.is_dir():
        found.append(f"--json {args.json}: there is no folder {args.json.parent}; create it first")
    if found:
        raise ConfigError("; ".join(found))
    require_libraries()
    if args.tasks:
        find_tasks(_settings(args, args.tasks))
    if args.lmms_tasks:
        _settings(args, args.lmms_tasks).check_folders()
        require_lmms(args.lmms_python)
    for hf_dir in args.hf_dir:
        load_hf_config(hf_dir)
        HfFolder.open(hf_dir)


def _job(args: argparse.Namespace) -> Job:
    path = args.data_path if "://" in args.data_path else Path(args.data_path)
    asked = DataJob(path, args.split, args.num_samples, args.every_answer)
    return Job(asked, reading_of(args), sampling_of(args), args.max_new_tokens, args.dtype)


def _tasks(args: argparse.Namespace, hf_dir: Path) -> list[TaskResult]:
    found = []
    if args.tasks:
        load_assets(hf_dir)
        max_length = int(load_hf_config(hf_dir).get_text_config().max_position_embeddings)
        found += run_tasks(hf_dir, max_length, TORCH_NAMES[args.dtype], _settings(args, args.tasks))
    if args.lmms_tasks:
        found += run_lmms_tasks(hf_dir, args.lmms_python, _settings(args, args.lmms_tasks))
    return found


def _settings(args: argparse.Namespace, names: tuple[str, ...]) -> TaskSettings:
    return TaskSettings(names, tuple(args.include_path), args.num_samples, args.batch_size)


def _write(path: Path, results: Sequence[ModelResult]) -> None:
    text = json.dumps(as_json(results), ensure_ascii=False, indent=1) + "\n"
    with naming(path):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
