"""What `evaluate --json` wrote → the share of right answers to each form of question, and the majority answer's."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_answers(file: Path, rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the answers of each model in a file of `evaluate`, in the order of the rows that were prepared.

    Raises:
        ValueError: an answer is missing.
    """
    found = {}
    for model in json.loads(file.read_text(encoding="utf-8"))["models"]:
        answers = {row_number(x["key"]): x["answer"] for x in model["data"]["samples"]}
        if sorted(answers) != list(range(len(rows))) or None in answers.values():
            raise ValueError(f"{file}: {model['model']} has not answered each of {len(rows)} questions")
        found[Path(model["model"]).name] = [answers[i].strip() for i in range(len(rows))]
    return found


def row_number(key: str) -> int:
    """Return the row in the source of a sample of `prepare`: its key ends with it."""
    return int(key.rsplit("/", 1)[-1].split(".")[0])


def form_of(row: dict[str, Any]) -> str:
    """Return the form of an exam's question: its id is the emoji's code and the form."""
    return str(row["id"]).split(" ", 1)[1]


def right_answer(row: dict[str, Any]) -> str:
    """Return what is right; the exam has one question in a conversation."""
    return str(row["messages"][-1]["content"])


def accuracy(rows: Sequence[dict[str, Any]], answers: Sequence[str]) -> dict[str, float]:
    """Return the share of exact matches of each form."""
    right: dict[str, list[bool]] = defaultdict(list)
    for row, answer in zip(rows, answers, strict=True):
        right[form_of(row)].append(answer == right_answer(row))
    return {form: sum(x) / len(x) for form, x in right.items()}


def majority(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of the most frequent right answer of each form: what one answer to all questions would reach."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[form_of(row)][right_answer(row)] += 1
    return {form: max(x.values()) / x.total() for form, x in counts.items()}


def number_of_questions(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the number of questions of each form."""
    return dict(Counter(map(form_of, rows)))
