"""Requests for tasks of lm-eval and lmms-eval, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.errors import DataError, problems

NOT_METRICS = ("sample_len", "sample_count")


@dataclass(frozen=True)
class TaskSettings:
    """`names`: of tasks or groups. `folders`: with task files of one's own. `limit`: documents per task; None: all.

    `batch_size`: documents that are answered at the same time; padding changes the last bits of logits.
    """

    names: tuple[str, ...]
    folders: tuple[Path, ...] = ()
    limit: int | None = None
    batch_size: int = 1

    def check_folders(self) -> None:
        """Raise DataError if a folder does not exist."""
        errors = [f"there is no folder {folder}" for folder in self.folders if not folder.is_dir()]
        if errors:
            raise DataError(problems("tasks cannot be found", errors))


@dataclass(frozen=True)
class TaskSample:
    """One document of a task. `answer`: after the task's filters."""

    number: int
    target: str
    answer: str


@dataclass(frozen=True)
class TaskResult:
    """One task. `metrics`: by the harness's names, "metric" or "metric,filter"."""

    task: str
    metrics: dict[str, float]
    samples: tuple[TaskSample, ...]

    @property
    def num_samples(self) -> int:
        """Documents; each is listed once per filter."""
        return len({sample.number for sample in self.samples})


def task_result(task: str, metrics: Mapping[str, Any], documents: Iterable[Mapping[str, Any]]) -> TaskResult:
    """Return one task from a harness's results and samples."""
    values = {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and "_stderr" not in name and name not in NOT_METRICS
    }
    samples = [TaskSample(x["doc_id"], str(x["target"]), str(_first(x["filtered_resps"]))) for x in documents]
    return TaskResult(task, values, tuple(samples))


def _first(answers: Sequence[Any] | str) -> Any:
    return answers if isinstance(answers, str) else answers[0]
