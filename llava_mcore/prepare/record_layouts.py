"""A row's dictionary -> turns and references to images, videos and audio clips. No file is opened here.

Known layouts, distinguished by their keys: `conversations` or `messages` (lists of turns, `from`/`value` or
`role`/`content`, content as text or in typed parts), the fields of `ROW_LAYOUTS`, and question with answer.
`record_keys` says which other keys are honored. docs/extend/data_format.md adds a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llava_mcore.data.encode.marks import as_text
from llava_mcore.data.encode.messages import as_records, check_order, complete
from llava_mcore.data.encode.record_keys import (
    INPUT_KEY,
    OBJECTS_KEY,
    PAIR,
    REJECTED_IMAGES,
    REJECTED_KEYS,
    ROW,
    TURN_LISTS,
    decoded,
    full_value,
    is_full,
    majority,
)
from llava_mcore.data.encode.tools import tools_of
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.prepare.record_parts import RowMedia, listed_media, refuse_marks
from llava_mcore.prepare.record_turns import ListedTurns, from_pairs, from_turns, text_of
from llava_mcore.prepare.row_types import BadSample, Draft, Reason, reason_for

ROW_LAYOUTS: dict[str, Callable[[Any, RowMedia], ListedTurns]] = {"texts": from_pairs}
"""Further layouts: the field that holds a conversation, and the function that reads its value (pairs of user and
assistant)."""
PAIRS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("question", ("answer", "answers")),
    ("instruction", ("output",)),
    ("query", ("response",)),
    ("prompt", ("completion", "response")),
)
"""Fields of a question, and of the answer to it."""
CONTINUED = ("prompt", "completion")
"""Fields of two lists of messages, of which only the second one is trained, as in TRL."""
OBJECT_MARKS = ("<bbox>", "<ref-object>", "<quad>", "<point>")
"""Marks that other programs fill from `objects`."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a row's fields; None: the default names."""

    image: str | None = None
    question: str | None = None
    answer: str | None = None
    captions: bool = False
    """Answers may have no question: the image is the question."""
    video: str | None = None
    audio: str | None = None
    pairs: bool = False
    """Rows have a chosen and a rejected answer."""

    @property
    def images(self) -> tuple[str, ...]:
        """Fields that may contain images."""
        return ("image", "images") if self.image is None else (self.image,)

    @property
    def videos(self) -> tuple[str, ...]:
        """Fields that may contain videos."""
        return ("video", "videos") if self.video is None else (self.video,)

    @property
    def audios(self) -> tuple[str, ...]:
        """Fields that may contain audio clips."""
        return ("audio", "audios") if self.audio is None else (self.audio,)

    @property
    def questions(self) -> tuple[str, ...]:
        """Fields that may contain the question."""
        return tuple(key for key, _ in PAIRS) if self.question is None else (self.question,)

    @property
    def answers(self) -> tuple[str, ...]:
        """Fields that may contain the answer."""
        default = dict.fromkeys(key for _, names in PAIRS for key in names)
        return tuple(default) if self.answer is None else (self.answer,)

    @property
    def media(self) -> dict[str, tuple[str, ...]]:
        """Fields that may contain images, videos and audio clips, by mark."""
        return {IMAGE_MARK: self.images, VIDEO_MARK: self.videos, AUDIO_MARK: self.audios}

    def all(self) -> frozenset[str]:
        """Return every field that is read or checked."""
        media = (*self.images, *self.videos, *self.audios)
        texts = (*TURN_LISTS, *ROW_LAYOUTS, *PAIR, INPUT_KEY, OBJECTS_KEY, *self.questions, *self.answers)
        texts = (*texts, "text", *REJECTED_KEYS, REJECTED_IMAGES) if self.pairs else texts
        return frozenset((*texts, *media)) | ROW.honored | ROW.refused.keys()


def parse(row: Mapping[str, Any], keys: Keys, layout: str | None = None, untaken: Collection[str] = ()) -> Draft:
    """Return the turns and media of a row, with `<image>`, `<video>` and `<audio>` in their positions.

    Args:
        layout: "conversations" or "messages" to accept no other.
        untaken: marks of media that the model does not take, which are text in rows without such media.

    Raises:
        BadSample: the row cannot be a sample.
    """
    with reason_for(Reason.KEY):
        ROW.check(row)
    media = RowMedia({mark: listed_media(row, names) for mark, names in keys.media.items()}, untaken)
    result = _layout(row, keys, layout, media)
    _refuse_objects(row, result.turns)
    with reason_for(Reason.KEY):
        turns = complete(result.turns, row)
        tools = tools_of(row)
    for index, turn in enumerate(turns):
        if turn.role == "system":
            refuse_marks(turn.text, turn.role, f"turn {index}", untaken)
    unused = [*ROW.unused(row, {*(name for names in keys.media.values() for name in names), *result.read})]
    placed = media.all()
    literal = [mark for mark in untaken if not placed[mark]]
    turns = tuple(replace(turn, text=as_text(turn.text, literal)) for turn in turns)
    images, videos, audios = (placed[mark] for mark in (IMAGE_MARK, VIDEO_MARK, AUDIO_MARK))
    return Draft(turns, images, videos, audios, tools, frozenset((*unused, *result.unused)))


def _layout(row: Mapping[str, Any], keys: Keys, layout: str | None, media: RowMedia) -> ListedTurns:
    """Return the turns of the first layout that is full, else of an empty list of turns."""
    lists = {key: as_records(decoded(row.get(key))) for key in (TURN_LISTS if layout is None else (layout,))}
    full = [key for key, value in lists.items() if is_full(value)]
    if full:
        result = from_turns(lists[full[0]], full[0], media)
        for other in full[1:]:
            _require_same(result.turns, lists[other], full[0], other, media)
        return replace(result, read={*full})
    for key, read in ROW_LAYOUTS.items() if layout is None else ():
        value = as_records(decoded(row.get(key)))
        if is_full(value):
            return read(value, media)
    continued = _continued(row, media) if layout is None else None
    if continued is not None:
        return continued
    asked = _asked(row, keys, media) if layout is None else None
    if asked is not None:
        return asked
    empty = [key for key, value in lists.items() if value is not None]
    if empty:
        return from_turns(lists[empty[0]], empty[0], media)
    if layout is not None:
        raise BadSample(Reason.NO_CONVERSATION, f"there is no {layout!r}, found the keys {sorted(row)}")
    own_keys = keys.answers if keys.captions else keys.questions
    names = ", ".join((*TURN_LISTS, *ROW_LAYOUTS, *own_keys))
    flag = "--answer-key" if keys.captions else "--question-key"
    message = f"none of {names} exists ({flag} names another), found, of the keys that are read, {sorted(row)}"
    raise BadSample(Reason.NO_CONVERSATION, message)


def _continued(row: Mapping[str, Any], media: RowMedia) -> ListedTurns | None:
    """Return the turns of a prompt and a completion that are lists of messages; only the completion is trained."""
    prompt, completion = (decoded(row.get(key)) for key in CONTINUED)
    if not all(isinstance(value, (list, tuple)) and is_full(value) for value in (prompt, completion)):
        return None
    result = from_turns([*prompt, *completion], " + ".join(CONTINUED), media)
    before = [
        turn if turn.role != "assistant" else replace(turn, trained=False) for turn in result.turns[: len(prompt)]
    ]
    return replace(result, turns=[*before, *result.turns[len(prompt) :]], read={*CONTINUED})


def _require_same(turns: Sequence[Turn], items: Any, key: str, other: str, media: RowMedia) -> None:
    """Raise BadSample if a second list of turns says anything else than the first."""
    second = from_turns(items, other, RowMedia(media.listed, media.untaken)).turns
    if second != list(turns):
        raise BadSample(Reason.DIFFERENT, f"`{key}` and `{other}` differ")


# -- question and answer ---------------------------------------------------------------------------------------------


def _asked(row: Mapping[str, Any], keys: Keys, media: RowMedia) -> ListedTurns | None:
    """Return question and answer, without surrounding white space as in training; None if there is no question."""
    present = [key for key in keys.questions if row.get(key) is not None]
    question_key = next((key for key in present if is_full(row[key])), present[0] if present else "")
    answer, answer_keys = _answer(row, question_key, keys)
    extra = text_of(row[INPUT_KEY], INPUT_KEY).strip() if is_full(row.get(INPUT_KEY)) else ""
    if not question_key and (answer is None or not (extra or keys.captions)):
        return None
    question = text_of(row[question_key], question_key).strip() if question_key else ""
    if answer is None:
        raise BadSample(Reason.NO_ANSWER, "there is a question, but no answer")
    text = text_of(_one_answer(answer), "the answer").strip()
    refuse_marks(text, "assistant", "the answer", media.untaken)
    turns = [Turn("user", "\n".join(filter(None, (question, extra)))), Turn("assistant", text)]
    return ListedTurns(turns, {question_key, INPUT_KEY, *answer_keys})


def _answer(row: Mapping[str, Any], question_key: str, keys: Keys) -> tuple[Any, tuple[str, ...]]:
    """Return the answer to a question, or a list of several, and the keys that were read.

    An answer beside a list of answers has been chosen from them.
    """
    own_keys = dict(PAIRS).get(question_key, ()) if keys.answer is None else ()
    names = own_keys if any(row.get(key) is not None for key in own_keys) else keys.answers
    full = [key for key in names if is_full(row.get(key))]
    chosen = [key for key in full if isinstance(row[key], str)]
    lists = [key for key in full if isinstance(row[key], (list, tuple))]
    if len(chosen) == 1 and len(lists) == len(full) - 1 and all(_is_one_of(row[chosen[0]], row[key]) for key in lists):
        return row[chosen[0]], tuple(full)
    with reason_for(Reason.WRONG_TYPE):
        return full_value(row, names), tuple(names)


def _is_one_of(answer: str, answers: Sequence[Any]) -> bool:
    return any(majority([item]) == answer for item in answers)


def _one_answer(answer: Any) -> Any:
    """Return the answer, or the most frequent one of several."""
    value = answer["text"] if isinstance(answer, Mapping) and isinstance(answer.get("text"), (list, tuple)) else answer
    if isinstance(value, Mapping):
        value = [value]
    return majority(value) if isinstance(value, (list, tuple)) and value else value


# -- checks ----------------------------------------------------------------------------------------------------------


def _refuse_objects(row: Mapping[str, Any], turns: Sequence[Turn]) -> None:
    """Raise BadSample for marks that had to be filled from `objects`."""
    objects = decoded(row.get(OBJECTS_KEY))
    marks = [mark for mark in OBJECT_MARKS if any(mark in turn.text for turn in turns)]
    if is_full(objects) and marks:
        raise BadSample(
            Reason.KEY,
            f"{' and '.join(marks)} would have to be filled from `{OBJECTS_KEY}`, which is not supported: every model "
            "has its own format of coordinates; write them into the text",
        )


def check_turns(turns: Sequence[Turn]) -> None:
    """Raise BadSample unless users and assistants take turns, no turn is empty, and the last one is an answer."""
    for index, turn in enumerate(turns):
        if not turn.text.strip() and turn.role in ("user", "assistant") and "tool_calls" not in turn.fields:
            reason = Reason.EMPTY_ANSWER if turn.role == "assistant" else Reason.EMPTY_QUESTION
            raise BadSample(reason, f"turn {index} has no text")
        for text in (turn.text, turn.reasoning):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                message = f"turn {index}: {error.reason} at character {error.start}"
                raise BadSample(Reason.NOT_UTF8, message) from error
    roles = [turn.role for turn in turns]
    if "assistant" not in roles:
        raise BadSample(Reason.NO_ANSWER, f"only {', '.join(roles) or 'nothing'}")
    if roles[-1] != "assistant":
        raise BadSample(Reason.ROLE_ORDER, f"an answer is needed at the end; found {', '.join(roles)}")
    with reason_for(Reason.ROLE_ORDER):
        check_order(turns)
