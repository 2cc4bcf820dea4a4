"""The questions asked about a digit: several forms, each in several wordings, with the answer each one calls for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Form:
    """One kind of question. A wording may hold {n}, the word of a number from 1 to 8 drawn for each question."""

    wordings: tuple[str, ...]
    answer: Callable[[int, int], str]
    """From the digit and n to the expected answer."""
    weight: int
    """How often it is asked while training, relative to the other forms."""


@dataclass(frozen=True)
class Question:
    """A question about one picture."""

    form: str
    text: str
    answer: str


def yes_no(truth: bool) -> str:
    return "yes" if truth else "no"


FORMS: dict[str, Form] = {
    "which digit (numeral)": Form(
        (
            "Which digit is this? Answer with a numeral.",
            "What digit do you see? Write it as a numeral.",
            "Read the digit and give the numeral.",
        ),
        lambda digit, n: str(digit),
        weight=5,
    ),
    "which digit (word)": Form(
        (
            "Which digit is this? Answer with a word.",
            "What digit do you see? Write it as a word.",
            "Read the digit and spell it out.",
        ),
        lambda digit, n: WORDS[digit],
        weight=5,
    ),
    "even or odd": Form(
        ("Is this digit even or odd?", "Even or odd?", "Is the number shown odd or even?"),
        lambda digit, n: "odd" if digit % 2 else "even",
        weight=2,
    ),
    "larger than n": Form(
        ("Is it larger than {n}?", "Is this digit greater than {n}?", "Does the picture show more than {n}?"),
        lambda digit, n: yes_no(digit > n),
        weight=1,
    ),
    "smaller than n": Form(
        ("Is it smaller than {n}?", "Is this digit less than {n}?", "Does the picture show less than {n}?"),
        lambda digit, n: yes_no(digit < n),
        weight=1,
    ),
    "one more": Form(
        ("Which number comes next?", "Add one to this digit. Answer with a word.", "What is one more than this?"),
        lambda digit, n: WORDS[digit + 1],
        weight=2,
    ),
}
WHICH_DIGIT = ("which digit (numeral)", "which digit (word)")


def ask(form: str, digit: int, rng: random.Random) -> Question:
    """Word one question of a form about a digit, with its answer."""
    kind, n = FORMS[form], rng.randint(1, 8)
    return Question(form, rng.choice(kind.wordings).format(n=WORDS[n]), kind.answer(digit, n))


def draw_form(rng: random.Random) -> str:
    """Draw a form by weight."""
    return rng.choices(list(FORMS), [form.weight for form in FORMS.values()])[0]


def corpus() -> list[str]:
    """Return every question and every answer once: the text that the tokenizer is trained on."""
    questions = {w.format(n=n) for form in FORMS.values() for w in form.wordings for n in WORDS[1:9]}
    answers = {form.answer(digit, n) for form in FORMS.values() for digit in range(10) for n in range(1, 9)}
    return sorted(questions) + sorted(answers)
