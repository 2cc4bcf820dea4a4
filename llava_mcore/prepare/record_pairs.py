"""Rows with a chosen and a rejected answer to one question, in the layouts that other programs read.

TRL: `prompt`, `chosen` and `rejected` as texts or lists of messages; or whole conversations as `chosen` and `rejected`.
LLaMA-Factory: `conversations` (or `instruction`), then one turn (or a text) as `chosen` and as `rejected`.
Megatron-SWIFT: `messages` (or `query` and `response`) with the chosen answer, then `rejected_response`, which is a text
or messages, or a whole conversation as `rejected_messages`.
RLHF-V: `text` is JSON of `question`, `chosen` and `rejected`; RLAIF-V has them as fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from llava_mcore.data.encode.messages import role_of
from llava_mcore.data.encode.record_keys import (
    CHOSEN,
    PAIR,
    REJECTED,
    REJECTED_IMAGES,
    REJECTED_KEYS,
    TURN_LISTS,
    decoded,
    is_full,
)
from llava_mcore.data.samples import Turn
from llava_mcore.prepare.record_layouts import CONTINUED, PAIRS, Keys, parse
from llava_mcore.prepare.row_types import BadSample, Draft, Reason

PROMPT = CONTINUED[0]
NESTED = "text"
"""Field that is JSON text of a pair, in RLHF-V."""
ROLE_KEYS = ("role", "from")
BEGINNING = ("user", "system")
"""Roles with which a whole conversation begins."""


def refuse_pair(row: Mapping[str, Any]) -> None:
    """Raise BadSample for a row with two answers, which would be read as one with none."""
    if all(is_full(row.get(key)) for key in PAIR):
        raise BadSample(Reason.PAIR, f"`{CHOSEN}` and `{REJECTED}`: give --preference-pairs to prepare pairs")


def parse_pair(
    row: Mapping[str, Any], keys: Keys, layout: str | None = None, untaken: Collection[str] = ()
) -> tuple[Draft, Draft]:
    """Return the conversations with the chosen and with the rejected answer. Only turns in which they differ are
    trained.

    Args:
        layout, untaken: see `parse`.

    Raises:
        BadSample: the row is not a pair, or one that cannot be used.
    """
    row = _with_pair(_flat(row))
    if is_full(row.get(REJECTED_IMAGES)):
        raise BadSample(Reason.DIFFERENT, f"`{REJECTED_IMAGES}`: the images of the two answers must be the same")
    missing = [f"`{key}`" for key in PAIR if not is_full(row.get(key))]
    if missing:
        raise BadSample(Reason.NO_ANSWER, f"--preference-pairs, but there is no {' and no '.join(missing)}")
    chosen, rejected = (parse(_with_answer(row, row[key], keys), keys, layout, untaken) for key in PAIR)
    if (chosen.images, chosen.videos, chosen.audios) != (rejected.images, rejected.videos, rejected.audios):
        raise BadSample(Reason.DIFFERENT, "the images, videos or audio clips of the two answers differ")
    # What comes before both answers is the prompt.
    same = takewhile(lambda turns: turns[0] == turns[1], zip(chosen.turns, rejected.turns, strict=False))
    num_same = sum(1 for _ in same)
    sides = [draft.turns[num_same:] for draft in (chosen, rejected)]
    if not any(sides):
        raise BadSample(Reason.SAME_ANSWERS, "there is nothing to prefer")
    for name, turns in zip(PAIR, sides, strict=True):
        if not turns or turns[0].role != "assistant":
            turn_there = f"a turn of the {turns[0].role}" if turns else "nothing"
            raise BadSample(
                Reason.DIFFERENT,
                f"the conversations differ from turn {num_same}, where `{name}` has {turn_there}, not an answer",
            )
    return _trained_from(chosen, num_same), _trained_from(rejected, num_same)


def _trained_from(draft: Draft, first: int) -> Draft:
    """Return a draft of which no answer before a turn is trained."""

    def untrained(turn: Turn) -> Turn:
        return replace(turn, trained=False) if turn.role == "assistant" else turn

    return replace(draft, turns=(*map(untrained, draft.turns[:first]), *draft.turns[first:]))


def _flat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the fields of its JSON text, if the pair is there."""
    nested = decoded(row.get(NESTED))
    if not isinstance(nested, Mapping) or not any(key in nested for key in PAIR):
        return row
    return {**{key: value for key, value in row.items() if key != NESTED}, **nested}


def _with_pair(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row whose chosen answer is its own one, and the other beside it, with a field for each."""
    full = [key for key in REJECTED_KEYS if is_full(row.get(key))]
    if len(full) != 1 or any(is_full(row.get(key)) for key in PAIR):
        return row
    rest = {key: value for key, value in row.items() if key not in REJECTED_KEYS}
    rejected = row[full[0]]
    turns = next((key for key in TURN_LISTS if _messages(rest.get(key)) is not None), None)
    if turns is not None:
        chosen = _messages(rest.pop(turns)) or []
        last = _messages(rejected) or [{"role": "assistant", "content": rejected}]
        is_whole = role_of(_role_name(last[0])) in BEGINNING
        return {**rest, CHOSEN: chosen, REJECTED: last if is_whole else [*chosen[:-1], *last]}
    answer = next((key for _, keys in PAIRS for key in keys if is_full(rest.get(key))), None)
    return row if answer is None else {**rest, CHOSEN: rest.pop(answer), REJECTED: rejected}


def _with_answer(row: Mapping[str, Any], answer: Any, keys: Keys) -> dict[str, Any]:
    """Return the row of a conversation that ends with one of the answers."""
    rest = {key: value for key, value in row.items() if key not in PAIR}
    messages = _messages(answer)
    if messages is not None and role_of(_role_name(messages[0])) in BEGINNING:
        return {**_without_prompt(row, rest, messages, keys), "messages": messages}
    # The turns before the answer are a list.
    prompt = next((key for key in (*TURN_LISTS, PROMPT) if _messages(rest.get(key)) is not None), None)
    if prompt is not None:
        before = _messages(rest.pop(prompt)) or []
        return {**rest, "messages": [*before, *(messages or [{"role": "assistant", "content": answer}])]}
    # Or a question that is text. An answer that is text too belongs to it as in any other row.
    question = next((key for key in keys.questions if is_full(rest.get(key))), "")
    if messages is None:
        answer_keys = dict(PAIRS).get(question, keys.answers) if keys.answer is None else keys.answers
        return {**rest, answer_keys[0]: answer}
    asked = {"role": "user", "content": rest.pop(question)} if question else None
    return {**rest, "messages": [*([] if asked is None else [asked]), *messages]}


def _without_prompt(row: Mapping[str, Any], rest: Mapping[str, Any], messages: list[Any], keys: Keys) -> dict[str, Any]:
    """Return the rest of a row without what its answer, a whole conversation, repeats. BadSample for anything else."""
    both = [_messages(row[key]) for key in PAIR]
    contents = [message.get(key) for message in messages for key in ("content", "value")]
    repeated = set()
    for key in (*TURN_LISTS, *keys.questions):
        listed = _messages(rest.get(key))
        if listed in both or listed == messages[: len(listed or ())] or (listed is None and rest.get(key) in contents):
            repeated.add(key)
        elif is_full(rest.get(key)):
            raise BadSample(Reason.DIFFERENT, f"`{key}` is not in the conversations of `{CHOSEN}` and `{REJECTED}`")
    return {key: value for key, value in rest.items() if key not in repeated}


def _messages(value: Any) -> list[Any] | None:
    """Return a value that is a message, or a list of them, as a list; None for anything else, such as text."""
    value = decoded(value)
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, (list, tuple)) or not listed:
        return None
    is_message = all(isinstance(item, Mapping) and any(is_full(item.get(key)) for key in ROLE_KEYS) for item in listed)
    return list(listed) if is_message else None


def _role_name(message: Mapping[str, Any]) -> Any:
    return next(message[key] for key in ROLE_KEYS if is_full(message.get(key)))
