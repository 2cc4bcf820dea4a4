"""Messages and the other fields of a row -> turns and tools, for `prepare` and for training alike.

A message is `{"role": …, "content": text}` with whatever `record_keys.TURN` honors. DataError says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from llava_mcore.data.encode.record_keys import (
    HISTORY_KEY,
    LOSS_KEYS,
    NEGATED_LOSS_KEYS,
    REASONING_KEYS,
    SYSTEM_KEYS,
    DifferingError,
    NothingTrainedError,
    decoded,
    full_value,
    is_full,
)
from llava_mcore.data.encode.tools import calls_of, tool_calls, tools_of, without_filling
from llava_mcore.data.samples import Turn
from llava_mcore.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
CALLS = frozenset(("function_call", "tool_call", "function-call", "tool-call"))
"""Roles of turns whose content is the JSON of the functions that the assistant calls."""
ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "customer"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "chatbot", "ai", "llm"), "assistant"),
    **dict.fromkeys(CALLS, "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "function_response", "ipython"), "tool"),
}
"""Names of roles in lower case."""
ORDER = "user and assistant must take turns, the user first; results of tools come between two turns of the assistant"
_BOOLS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def role_of(name: Any) -> Role | None:
    """Return the role of a name such as "GPT"; None if it is unknown."""
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def is_call_role(name: str) -> bool:
    """Return whether a turn of this role contains the JSON of function calls."""
    return name.strip().lower() in CALLS


# -- what is trained -------------------------------------------------------------------------------------------------


def said_to_train(record: Mapping[str, Any], where: str) -> bool | list[bool] | None:
    """Return whether a turn or row asks to be trained: a truth value, a list with an entry per turn, or None if it does
    not say.

    Raises DataError for anything but 0 and 1, and for two keys that contradict each other.
    """
    said: dict[str, bool | list[bool]] = {}
    for key in record:
        if (key in LOSS_KEYS or key in NEGATED_LOSS_KEYS) and is_full(record[key]):
            value, negated = decoded(record[key]), key in NEGATED_LOSS_KEYS
            if isinstance(value, (list, tuple)):
                said[key] = [_flag(item, key, where) != negated for item in value]
            else:
                said[key] = _flag(value, key, where) != negated
    values = list(said.values())
    if any(value != values[0] for value in values):
        raise DataError(f"{where}: {' and '.join(f'`{key}`' for key in said)} contradict each other")
    return values[0] if values else None


def _flag(value: Any, key: str, where: str) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _BOOLS:
        return _BOOLS[value.strip().lower()]
    raise DataError(f"{where}: `{key}` is {value!r:.60}; an answer is trained or not, so only 0 and 1 are possible")


def with_losses(turns: Sequence[Turn], said: bool | list[bool] | None, where: str) -> tuple[Turn, ...]:
    """Return the turns marked as trained or not, as the row says. `said`: for all answers, for each turn, or for each
    answer."""
    if said is None:
        return tuple(turns)
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    if isinstance(said, bool):
        flags = dict.fromkeys(answers, said)
    elif len(said) == len(turns):
        flags = dict(enumerate(said))
    elif len(said) == len(answers):
        flags = dict(zip(answers, said, strict=True))
    else:
        raise DataError(f"{where} has {len(said)} entries for {len(turns)} turns with {len(answers)} answers")
    return tuple(
        replace(turn, trained=turn.trained and flags[index]) if index in answers else turn
        for index, turn in enumerate(turns)
    )


# -- messages --------------------------------------------------------------------------------------------------------


def turn_of(message: Mapping[str, Any], role: Role, text: str, where: str, *, is_call: bool = False) -> Turn:
    """Return the turn of a message: its text and all its other fields.

    is_call: the text is the JSON of the functions that are called.
    """
    fields: dict[str, Any] = {}
    calls = calls_of(decoded(text), where) if is_call else tool_calls(message, where)
    if calls:
        fields["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if is_full(message.get(key)):
            fields[key] = message[key]
    said = said_to_train(message, where)
    if isinstance(said, list):
        raise DataError(f"{where}: a turn is trained or not; parts of an answer cannot be trained")
    reasoning = full_value(message, REASONING_KEYS)
    if is_full(reasoning) and not isinstance(reasoning, str):
        raise DataError(f"{where}: the reasoning must be text, found {reasoning!r:.80}")
    if role != "assistant" and (calls or is_full(reasoning)):
        raise DataError(f"{where}: a turn of the {role} has reasoning or calls tools; only the assistant's may")
    trained = role != "assistant" or said is not False
    return Turn(role, "" if is_call else text, trained, reasoning or "", fields)


def as_records(value: Any) -> Any:
    """Return objects whose fields were written as one list each, {"role": […], "content": […]}, as a list of objects.

    `datasets` stores a Sequence of objects in this way. Anything else is returned unchanged.
    """
    if not isinstance(value, Mapping) or not value:
        return value
    columns = [column for column in value.values() if column is not None]
    if not columns or not all(isinstance(column, (list, tuple)) for column in columns):
        return value
    if len({len(column) for column in columns}) > 1:
        return value
    full = {key: column for key, column in value.items() if column is not None}
    return [dict(zip(full, items, strict=True)) for items in zip(*columns, strict=True)]


def message_of(turn: Turn) -> dict[str, Any]:
    """Return the message of a turn: the inverse of `turn_of`."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.text, **turn.fields}
    if turn.reasoning:
        message[REASONING_KEYS[0]] = turn.reasoning
    return message if turn.trained else {**message, "loss": False}


def merged(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns with calls that were written as turns of their own joined to the assistant's turn before."""
    result: list[Turn] = []
    for turn in turns:
        before = result[-1] if result else None
        is_call = turn.role == "assistant" and "tool_calls" in turn.fields and not turn.text and not turn.reasoning
        if is_call and before is not None and before.role == "assistant" and before.trained == turn.trained:
            calls = [*before.fields.get("tool_calls", ()), *turn.fields["tool_calls"]]
            result[-1] = replace(before, fields={**before.fields, "tool_calls": calls})
        else:
            result.append(turn)
    return tuple(result)


# -- what stands beside the messages ---------------------------------------------------------------------------------


def complete(turns: Sequence[Turn], row: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Return the turns that a row lists as the row wants them trained, after its system prompt and history.

    DataError if the row contradicts itself, NothingTrainedError if no answer is to be trained.
    """
    said = said_to_train(row, "the row")
    turns = without_filling(turns, tools_of(row))
    listed = merged(with_losses(turns, said, "the loss mask of the row"))
    result = with_surroundings(listed, row)
    if said is False:
        result = with_losses(result, said, "the row")
    answers = [turn for turn in result if turn.role == "assistant"]
    if answers and not any(turn.trained for turn in answers):
        raise NothingTrainedError("the loss of every answer is 0")
    return result


def with_surroundings(turns: Sequence[Turn], row: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Return the turns of a row after its system prompt and its history."""
    system = full_value(row, SYSTEM_KEYS)
    if is_full(system) and not isinstance(system, str):
        raise DataError(f"`system` must be text, found {system!r:.80}")
    first, rest = ([turns[0]], list(turns[1:])) if turns and turns[0].role == "system" else ([], list(turns))
    if first and is_full(system) and system.strip() != first[0].text.strip():
        raise DifferingError(f"two different system prompts: {system!r:.60} and {first[0].text!r:.60}")
    if not first and is_full(system):
        first = [Turn("system", system)]
    return (*first, *_history(row.get(HISTORY_KEY)), *rest)


def _history(value: Any) -> list[Turn]:
    """Return earlier questions and answers: pairs, or messages."""
    history = decoded(value)
    if not is_full(history):
        return []
    turns: list[Turn] = []
    for index, item in enumerate(history if isinstance(history, (list, tuple)) else [history]):
        where = f"{HISTORY_KEY}[{index}]"
        if isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(text, str) for text in item):
            turns += [Turn("user", item[0]), Turn("assistant", item[1])]
            continue
        text = full_value(item, ("content", "value")) if isinstance(item, Mapping) else None
        role = role_of(full_value(item, ("role", "from"))) if isinstance(item, Mapping) else None
        if role is None or not isinstance(text, str):
            raise DataError(f"{where} must be a question and its answer, or a message; found {item!r:.80}")
        turns.append(turn_of(item, role, text, where))
    return turns


def check_order(turns: Sequence[Turn]) -> None:
    """Raise DataError unless user and assistant take turns, after at most one system prompt at the beginning.

    Results of tools come after an answer, and before the next one. The last turn may be a question.
    """
    roles = [turn.role for turn in turns]
    if "system" in roles[1:]:
        raise DataError(f"a system message only at the beginning; found {', '.join(roles)}")
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    before = ""
    for role in spoken:
        after = {"": "user", "user": "assistant", "assistant": "user tool", "tool": "assistant tool"}[before]
        if role not in after.split():
            raise DataError(f"{ORDER}; found {', '.join(spoken)}")
        before = role
