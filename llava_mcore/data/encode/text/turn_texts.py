"""All texts of turns: what is said, thought, and passed to tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llava_mcore.data.encode.marks import escape, unescape
from llava_mcore.data.samples import Turn


def texts_of(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> Iterator[str]:
    """Yield every text. Outside of what is said, marks are literal text, and escaped here."""
    for turn in turns:
        yield turn.text
        yield from (escape(text) for text in _strings([turn.reasoning, turn.fields]))
    yield from (escape(text) for text in _strings(tools))


def changed(turn: Turn, change: Callable[[str], str]) -> Turn:
    """Return the turn with every text changed. `change`: gets texts as `texts_of` yields them."""
    reasoning, fields = changed_strings((turn.reasoning, turn.fields), change)
    return replace(turn, text=change(turn.text), reasoning=reasoning, fields=fields)


def changed_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain containers with every string in them, escaped, changed. Keys of objects stay."""
    if isinstance(value, str):
        return unescape(change(escape(value)))
    if isinstance(value, Mapping):
        return {key: changed_strings(item, change) for key, item in value.items()}
    return [changed_strings(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
