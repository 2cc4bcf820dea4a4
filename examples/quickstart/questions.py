"""The questions asked about a digit: several forms, each in several wordings, with the answer each one calls for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Form:
    """One kind of question. `weight`: how often it is asked while training, relative to the other forms."""

    wordings: tuple[str, ...]
    answer: Callable[[int], str]
    weight: int


@dataclass(frozen=True)
class Question:
    """A question about one image."""

    form: str
    text: str
    answer: str


FORMS: dict[str, Form] = {
    "which digit (numeral)": Form(
        (
            "Which digit is this? Answer with a numeral.",
            "What digit do you see? Write it as a numeral.",
            "Read the digit and give the numeral.",
        ),
        str,
        weight=6,
    ),
    "which digit (word)": Form(
        (
            "Which digit is this? Answer with a word.",
            "What digit do you see? Write it as a word.",
            "Read the digit and spell it out.",
        ),
        lambda digit: WORDS[digit],
        weight=6,
    ),
    "is it even": Form(
        ("Is this digit even?", "Is it an even number?", "Does the image show an even digit?"),
        lambda digit: "no" if digit % 2 else "yes",
        weight=2,
    ),
    "larger than five": Form(
        ("Is it larger than five?", "Is this digit greater than five?", "Does the image show more than five?"),
        lambda digit: "yes" if digit > 5 else "no",
        weight=2,
    ),
    "one more": Form(
        ("Which number comes next?", "Add one to this digit. Answer with a word.", "What is one more than this?"),
        lambda digit: WORDS[digit + 1],
        weight=2,
    ),
}
WHICH_DIGIT = ("which digit (numeral)", "which digit (word)")


def ask(form: str, digit: int, rng: random.Random) -> Question:
    """Word one question of a form about a digit, with its answer."""
    return Question(form, rng.choice(FORMS[form].wordings), FORMS[form].answer(digit))


def draw_form(rng: random.Random) -> str:
    """Draw a form by weight."""
    return rng.choices(list(FORMS), [form.weight for form in FORMS.values()])[0]


def corpus() -> list[str]:
    """Return every question and every answer once: the text that the tokenizer is trained on."""
    questions = {wording for form in FORMS.values() for wording in form.wordings}
    answers = {form.answer(digit) for form in FORMS.values() for digit in range(10)}
    return sorted(questions) + sorted(answers)
