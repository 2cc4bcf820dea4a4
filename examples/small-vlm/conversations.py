"""The questions about an image, each in several wordings, and the conversations for training and for the exam."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from pictures import Emoji

WHAT_KIND, ONE_OF_TWO, MAIN_COLOR = "what kind", "one of two kinds", "main color"
FORMS = (WHAT_KIND, ONE_OF_TWO, MAIN_COLOR)
WORDINGS = {
    WHAT_KIND: ("What kind of thing is shown?", "What kind of thing is this?", "What sort of thing is in the image?"),
    ONE_OF_TWO: ("Is this {} or {}?", "Does the image show {} or {}?"),
    MAIN_COLOR: ("What is its main color?", "Which color is it mostly?"),
}
NAMED = {
    "animal": "an animal",
    "building": "a building",
    "clothing": "clothing",
    "drink": "a drink",
    "face": "a face",
    "food": "food",
    "hand": "a hand",
    "instrument": "a musical instrument",
    "person": "a person",
    "plant": "a plant",
    "sport": "sports equipment",
    "symbol": "a symbol",
    "tool": "a tool",
    "vehicle": "a vehicle",
}


def ask(form: str, one: Emoji, others: Sequence[Emoji], rng: random.Random) -> tuple[str, str]:
    """Return a question about an emoji and its answer.

    Args:
        others: the wrong one of two kinds is the kind of one of these, so every kind is right and wrong equally often.
    """
    wording = rng.choice(WORDINGS[form])
    if form == MAIN_COLOR:
        assert one.color is not None
        return wording, one.color
    if form == ONE_OF_TWO:
        kinds = [one.kind, rng.choice([x.kind for x in others if x.kind != one.kind])]
        wording = wording.format(*[NAMED[kind] for kind in rng.sample(kinds, 2)])
    return wording, one.kind


def training_row(one: Emoji, others: Sequence[Emoji], number: int, picture: str, rng: random.Random) -> dict[str, Any]:
    """Return a conversation about one drawing: its kind is asked for in one of two forms, and its color.

    The order is random. No answer helps with another one.
    """
    forms = [WHAT_KIND if rng.random() < 0.6 else ONE_OF_TWO] + [MAIN_COLOR] * (one.color is not None)
    turns = [ask(form, one, others, rng) for form in rng.sample(forms, len(forms))]
    return row(f"{one.code} {number}", picture, turns)


def exam_rows(held_out: Sequence[Emoji], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield a conversation per question about held-out emoji."""
    for one in held_out:
        for form in FORMS:
            if form != MAIN_COLOR or one.color is not None:
                yield row(f"{one.code} {form}", f"{one.code}.png", [ask(form, one, held_out, rng)])


def row(name: str, picture: str, turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return what `prepare` reads; the image belongs to the first question."""
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    messages[0]["content"] = "<image>\n" + messages[0]["content"]
    return {"id": name, "images": [picture], "messages": messages}


def without_picture(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same conversations without their images: what the text-only baseline is trained on and asked."""
    found = []
    for one in rows:
        first, *rest = one["messages"]
        found.append({"id": one["id"], "messages": [{**first, "content": text(one)}, *rest]})
    return found


def text(row: dict[str, Any]) -> str:
    """Return the first question of a conversation, without the mark of its image."""
    return str(row["messages"][0]["content"]).removeprefix("<image>\n")
