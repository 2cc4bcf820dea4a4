"""The folder of example questions that the page shows."""

from __future__ import annotations

from pathlib import Path

from llava_mcore.errors import DataError, LlavaMcoreError, problems
from llava_mcore.files.regular import parse_object, read_text

QUESTIONS = "questions.jsonl"
MOST_PROBLEMS = 10


def check_examples(folder: Path) -> None:
    """Check a folder with images and a questions.jsonl.

    Raises:
        DataError: with every line that is wrong, up to ten.
    """
    file = folder / QUESTIONS
    if not file.is_file():
        raise DataError(f'{file} does not exist; it has a line per example: {{"image": "NAME.jpg", "question": "…"}}')
    errors = []
    for line_number, line in enumerate(read_text(file).splitlines(), 1):
        try:
            problem = _problem(folder, parse_object(line, f"line {line_number}", DataError)) if line.strip() else None
        except LlavaMcoreError as error:
            errors.append(str(error))
        else:
            errors += [f"line {line_number}: {problem}"] if problem is not None else []
    if errors:
        raise DataError(problems(f"{file} cannot be used", errors[:MOST_PROBLEMS]))


def _problem(folder: Path, example: dict[str, object]) -> str | None:
    image, question = example.get("image"), example.get("question")
    if not isinstance(image, str) or not isinstance(question, str):
        return f'"image" and "question" must be texts, found {image!r} and {question!r}'
    file = folder / image
    if not file.resolve().is_relative_to(folder.resolve()):
        return f"{image} is not in the folder"
    return None if file.is_file() else f"the image {image} does not exist"
