"""The result of a round of answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llava_mcore.inference.evaluation.metrics import Answered, score
from llava_mcore.inference.generation.records import Record

CONSOLE_METRICS = ("exact_match", "rougeL", "bleu")
"""Metrics of the console line."""


@dataclass(frozen=True)
class Example:
    """A question with its answer and its first picture, encoded; None without one."""

    record: Record
    picture: bytes | None


@dataclass(frozen=True)
class AnswersResult:
    """One round. `metrics`: by name, None if one is not defined or nothing was answered."""

    iteration: int
    metrics: dict[str, float | None]
    num_answers: int
    num_skipped: int
    seconds: float
    records: Sequence[Record]
    examples: Sequence[Example]

    def line(self) -> str:
        """Return the console line."""
        metrics = [f"{name} {value:.3f}" for name in CONSOLE_METRICS if (value := self.metrics.get(name)) is not None]
        skipped = f" | questions that could not be asked: {self.num_skipped}" if self.num_skipped else ""
        return (
            f"answers after step {self.iteration} | {' | '.join([*metrics, f'{self.num_answers} answers'])} | "
            f"{self.seconds:.1f} s{skipped}"
        )

    def values(self) -> dict[str, float]:
        """Return the numbers under their names in sinks."""
        return {f"answers/{name}": value for name, value in self.metrics.items() if value is not None}

    def record(self) -> dict[str, Any]:
        """Return the object to write as a JSON line."""
        counts = {"num_answers": self.num_answers, "num_skipped": self.num_skipped, "seconds": self.seconds}
        return {"iteration": self.iteration, "exact_match": None, **self.metrics, **counts}


def scored(records: Sequence[Record]) -> dict[str, float | None]:
    """Return the metrics of all answers; none without any. ConfigError if a package is missing."""
    pairs = [(record.answer, record.reference) for record in records]
    answered = [
        Answered(answer, (reference,)) for answer, reference in pairs if answer is not None and reference is not None
    ]
    if not answered:
        return {}
    return {name: value if math.isfinite(value) else None for name, value in score(answered).metrics.items()}
