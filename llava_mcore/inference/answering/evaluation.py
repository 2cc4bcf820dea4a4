"""Scores of several models on a dataset and on tasks, side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llava_mcore.files.atomic import replace_file
from llava_mcore.files.regular import naming
from llava_mcore.inference.evaluation.metrics import Answered, score
from llava_mcore.inference.evaluation.tasks import TaskResult
from llava_mcore.inference.generation.records import Record

DATA = "data"
WIDTH = 160
"""Width of the table where there is no terminal."""


@dataclass(frozen=True)
class DataResult:
    """Answers to a dataset's questions. `metrics`: None where one is not defined; empty if nothing was answered.

    `samples`: a line per question, with its metrics if it was answered.
    """

    metrics: dict[str, float | None]
    tokenizer: str | None
    num_answers: int
    num_skipped: int
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class ModelResult:
    """One model. `tasks`: of lm-eval and lmms-eval."""

    model: str
    data: DataResult | None = None
    tasks: list[TaskResult] = field(default_factory=list)

    def rows(self) -> dict[tuple[str, str], float | None]:
        """Return every metric by (task, name), and the number of questions; the dataset counts as a task."""
        values: dict[tuple[str, str], float | None] = {}
        if self.data is not None:
            values = {(DATA, "questions"): self.data.num_answers, (DATA, "not asked"): self.data.num_skipped}
            values |= {(DATA, name): value for name, value in self.data.metrics.items()}
        return values | {(task.task, name): value for task in self.tasks for name, value in task.metrics.items()}


def score_records(records: Sequence[Record]) -> DataResult:
    """Return the metrics of the questions that could be asked. ConfigError if a package is missing."""
    scored = [x.answer is not None and x.reference is not None for x in records]
    asked = [x for x, is_scored in zip(records, scored, strict=True) if is_scored]
    lines = [record.line() for record in records]
    if not asked:
        return DataResult({}, None, 0, len(records), lines)
    scores = score([Answered(str(x.answer), (str(x.reference),)) for x in asked])
    values = iter(scores.samples)
    samples = [line | (next(values) if is_scored else {}) for is_scored, line in zip(scored, lines, strict=True)]
    metrics = {name: value if math.isfinite(value) else None for name, value in scores.metrics.items()}
    return DataResult(metrics, scores.tokenizer, len(asked), len(records) - len(asked), samples)


def table(results: Sequence[ModelResult]) -> Table:
    """Return a row per metric and a column per model."""
    rows = [result.rows() for result in results]
    table_of_results = Table("task", "metric", *_short([result.model for result in results]))
    for task, name in dict.fromkeys(key for values in rows for key in values):
        cells = [values.get((task, name)) for values in rows]
        table_of_results.add_row(task, name, *[_cell(x) for x in cells])
    return table_of_results


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _short(models: Iterable[str]) -> list[str]:
    """Return the last part of each path, or whole paths if these are not different."""
    paths = list(models)
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else paths


def as_json(results: Sequence[ModelResult]) -> dict[str, Any]:
    """Return everything, samples too."""
    return {"models": [asdict(result) for result in results]}


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


def _write(path: Path, results: Sequence[ModelResult]) -> None:
    text = json.dumps(as_json(results), ensure_ascii=False, indent=1) + "\n"
    with naming(path):
        replace_file(path, text.encode("utf-8", "surrogatepass"))
