"""Lists of turns, and of pairs of question and answer -> turns. Media get the order of their marks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llava_mcore.data.encode.marks import TYPES
from llava_mcore.data.encode.messages import ROLES, is_call_role, role_of, said_to_train, turn_of
from llava_mcore.data.encode.record_keys import SYSTEM_KEYS, TURN, decoded, full_value, is_full
from llava_mcore.data.samples import Turn
from llava_mcore.prepare.record_parts import RowMedia, TurnContent, as_parts, list_of, read_content, refuse_marks
from llava_mcore.prepare.row_types import BadSample, Reason, reason_for, type_and_value


@dataclass(slots=True)
class ListedTurns:
    """The turns that a layout lists."""

    turns: list[Turn]
    read: set[str]
    """Keys of the row that were read."""
    unused: list[str] = field(default_factory=list)
    """Keys of turns and parts that nothing reads, as they are reported."""


def from_turns(items: Any, key: str, media: RowMedia) -> ListedTurns:
    """Return turns, and put media into the order of their marks: the part's own reference, else the next of the row.

    Raises BadSample.
    """
    records = [_record(item, f"{key}[{index}]") for index, item in enumerate(list_of(items, key))]
    contents = [_content_of(record) for record in records]
    # Beside typed parts, a mark is text, unless the row lists what it could stand for.
    is_typed = any(isinstance(content, (list, tuple)) for content in contents)
    literal = [mark for mark in TYPES if is_typed and not media.listed[mark]]
    result = ListedTurns([], {key})
    for index, (record, content) in enumerate(zip(records, contents, strict=True)):
        where = f"{key}[{index}]"
        turn, read = _turn(record, content, where, literal, media.untaken)
        for piece in read.pieces:
            media.place(piece, where)
        result.turns.append(turn)
        if turn.role != "assistant" and said_to_train(record, where) is True:
            result.unused.append("a loss of 1 of questions")
        result.unused += [*TURN.unused(record, ("speaker", "text")), *read.unused]
    return result


def _record(item: Any, where: str) -> Mapping[str, Any]:
    item = decoded(item)
    if not isinstance(item, Mapping):
        raise BadSample(Reason.WRONG_TYPE, f"{where} is {type_and_value(item)}, not an object")
    return item


def _content_of(record: Mapping[str, Any]) -> Any:
    """Return the content of a turn: text, typed parts, or anything else that was written there."""
    with reason_for(Reason.WRONG_TYPE):
        content = full_value(record, ("content", "value"))
    content = record.get("text") if content is None else content
    has_more = is_full(record.get("tool_calls")) or is_full(record.get("function_call"))
    if content is None and has_more:
        return ""
    if is_call_role(str(_role_name(record))):
        return json.dumps(content) if isinstance(content, (Mapping, list, tuple)) else content
    return as_parts(content)


def _role_name(record: Mapping[str, Any]) -> Any:
    """Return the name of a turn's role. BadSample if two keys name different roles."""
    names = [record[key] for key in ("role", "from") if is_full(record.get(key))] or [record.get("speaker")]
    if len({role_of(name) for name in names}) > 1:
        raise BadSample(Reason.DIFFERENT, f"`role` is {names[0]!r:.60} and `from` is {names[1]!r:.60}")
    return names[0]


def _turn(
    record: Mapping[str, Any], content: Any, where: str, literal: Sequence[str], untaken: Collection[str]
) -> tuple[Turn, TurnContent]:
    name = _role_name(record)
    role = role_of(name)
    if role is None:
        allowed = ", ".join(sorted(ROLES))
        raise BadSample(Reason.UNKNOWN_ROLE, f"{where}: {name!r:.80}; allowed: {allowed}", f"{name!r:.40}")
    if not isinstance(content, (str, list, tuple)):
        raise BadSample(Reason.WRONG_TYPE, f"{where} says {type_and_value(content)}, neither text nor typed parts")
    with reason_for(Reason.KEY):
        TURN.check(record, where)
    read = read_content(content, where, literal)
    is_call = is_call_role(str(name))
    if not is_call:
        for piece in read.pieces:
            if isinstance(piece, str):
                refuse_marks(piece, role, where, untaken)
    with reason_for(Reason.KEY):
        turn = turn_of(record, role, str(content) if is_call else read.text, where, is_call=is_call)
    thoughts = [text for text in (turn.reasoning, read.reasoning) if text]
    return replace(turn, reasoning="\n".join(dict.fromkeys(thoughts))), read


def from_pairs(pairs: Any, media: RowMedia) -> ListedTurns:
    """Return the turns of `texts`: objects with user, assistant, and perhaps a system prompt. Raises BadSample."""
    result = ListedTurns([], {"texts"})
    for index, pair in enumerate(list_of(pairs, "texts")):
        where = f"texts[{index}]"
        pair = _record(pair, where)
        with reason_for(Reason.KEY):
            TURN.check(pair, where)
            about = turn_of(pair, "assistant", "", where)
        with reason_for(Reason.WRONG_TYPE):
            system = full_value(pair, SYSTEM_KEYS)
        if is_full(system):
            result.turns.append(Turn("system", text_of(system, f"{where}.system")))
        result.turns.append(Turn("user", text_of(pair.get("user"), f"{where}.user")))
        answer = text_of(pair.get("assistant"), f"{where}.assistant")
        refuse_marks(answer, "assistant", where, media.untaken)
        result.turns.append(replace(about, text=answer))
        result.unused += TURN.unused(pair, ("user", "assistant", *SYSTEM_KEYS))
    return result


def text_of(value: Any, where: str) -> str:
    """Return a text. Raises BadSample for anything else."""
    if not isinstance(value, str):
        raise BadSample(Reason.WRONG_TYPE, f"{where} is {type_and_value(value)}, not text")
    return value
