"""Score models on a dataset and on tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from llava_mcore.cli.common import conversion_main
from llava_mcore.cli.flags.evaluate import parser, with_defaults
from llava_mcore.cli.flags.evaluate_checks import base_dir_of, check, data_of, layout_of, task_settings
from llava_mcore.cli.generate import reading_of, sampling_of
from llava_mcore.files.atomic import move, write_synced
from llava_mcore.files.text_files import naming
from llava_mcore.inference.answering.evaluation import DataResult, ModelResult, as_json, score_records, table
from llava_mcore.inference.answering.job import DataJob, Job
from llava_mcore.inference.answering.lmms_harness import run_lmms_tasks
from llava_mcore.inference.answering.megatron_answers import answer_checkpoint
from llava_mcore.inference.answering.transformers_answers import answer_folder
from llava_mcore.inference.evaluation.lm_harness import run_tasks
from llava_mcore.inference.evaluation.tasks import TaskResult
from llava_mcore.models.architectures.hf_config import load_hf_config

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: "auto"}
WIDTH = 160
"""Width of the table where there is no terminal."""


class EvaluationReport:
    """The finished results. The file is written again with every part, because the next one may take hours and fail."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results: list[ModelResult] = []

    def begin(self, model: Path) -> None:
        """Let the next parts be those of this model."""
        self.results.append(ModelResult(str(model)))

    def add(self, *, data: DataResult | None = None, tasks: Sequence[TaskResult] = ()) -> None:
        """Add a part of the last model and write the file."""
        last = self.results[-1]
        self.results[-1] = replace(last, data=data or last.data, tasks=[*last.tasks, *tasks])
        if self.path is not None:
            _write(self.path, self.results)

    def show(self) -> None:
        """Print a table of the models that have a part."""
        results = [x for x in self.results if x.data is not None or x.tasks]
        if not results:
            return
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        console.print(table(results))
        for result in results:
            if result.data is not None and result.data.num_skipped:
                skipped = f"questions that could not be asked and are not scored: {result.data.num_skipped} (--json)"
                print(f"{result.model}: {skipped}")


def run(args: argparse.Namespace) -> int:
    """Score; returns 0. What is finished is printed and written even if a later part fails."""
    typed, args = args, with_defaults(args)
    check(args, typed)
    report = EvaluationReport(args.json)
    try:
        for folder in args.hf_dir:
            report.begin(folder)
            _ask_folder(report, folder, args)
        for folder in args.megatron_dir:
            report.begin(folder)
            base_dir = base_dir_of(args, folder)
            report.add(data=score_records(answer_checkpoint(folder, _job(args), layout_of(args), base_dir)))
    finally:
        report.show()
    return 0


def _ask_folder(report: EvaluationReport, hf_dir: Path, args: argparse.Namespace) -> None:
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
    asked = DataJob(data_of(args), args.split, args.num_samples, args.every_answer)
    return Job(asked, reading_of(args), sampling_of(args), args.max_new_tokens, args.dtype)


def _write(path: Path, results: Sequence[ModelResult]) -> None:
    text = json.dumps(as_json(results), ensure_ascii=False, indent=1) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    with naming(path):
        write_synced(partial, text.encode("utf-8", "surrogatepass"))
        move(partial, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
