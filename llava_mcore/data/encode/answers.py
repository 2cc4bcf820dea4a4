"""The answer to train if a question has several, as in VQAv2 and TextVQA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

TEXT_KEYS = ("answer", "text", "value")
"""Keys of an answer that is an object, such as VQAv2's {"answer", "answer_confidence", "answer_id"}."""


def majority(answers: Sequence[Any]) -> Any:
    """Return the most frequent answer, ignoring case and surrounding white space; the first of equally frequent ones.

    Answers are texts, or objects with a text under one of TEXT_KEYS. None if there is none.
    """
    texts = [_text(answer) for answer in answers]
    full = [text for text in texts if isinstance(text, str) and text.strip()]
    if not full:
        return texts[0] if texts else None
    counts = Counter(text.strip().lower() for text in full)
    best = max(counts.values())
    return next(text for text in full if counts[text.strip().lower()] == best)


def _text(answer: Any) -> Any:
    if isinstance(answer, Mapping):
        return next((answer[key] for key in TEXT_KEYS if answer.get(key) is not None), None)
    return answer
