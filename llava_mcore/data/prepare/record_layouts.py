"""A row's dictionary -> who says what and where the pictures are. Nothing is opened here.

Known layouts, told apart by their keys: `conversations` or `messages` (lists of turns, `from`/`value` or
`role`/`content`, content as text or in typed parts), `texts` (lists of user/assistant pairs), and question with answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llava_mcore.data.prepare.records import BadSample, Draft, Reason
from llava_mcore.data.samples import IMAGE_MARK, Turn

Role = Literal["system", "user", "assistant"]
ROLES: Mapping[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
TURN_KEYS = ("conversations", "messages")
IMAGE_PART_KEYS = ("image_url", "image", "url", "path")
"""Where a typed part of a picture may say which one it is."""


@dataclass(frozen=True, slots=True)
class _ImagePart:
    """A picture among typed parts."""

    source: Any
    """What the part says of it; None: the next picture that the row lists."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a row's fields; None: the usual ones."""

    image: str | None = None
    question: str | None = None
    answer: str | None = None
    captions: bool = False
    """Answers may come without a question: the picture is all of it."""

    @property
    def images(self) -> tuple[str, ...]:
        """Fields that may hold pictures."""
        return ("image", "images") if self.image is None else (self.image,)

    @property
    def questions(self) -> tuple[str, ...]:
        """Fields that may hold the question."""
        return ("question",) if self.question is None else (self.question,)

    @property
    def answers(self) -> tuple[str, ...]:
        """Fields that may hold the answer."""
        return ("answer", "answers") if self.answer is None else (self.answer,)

    def all(self) -> frozenset[str]:
        """Return every field that is read."""
        return frozenset((*TURN_KEYS, "texts", "id", *self.images, *self.questions, *self.answers))


def parse(row: Mapping[str, Any], keys: Keys, layout: str | None = None) -> Draft:
    """Return the turns and pictures of a row, `<image>` standing where a picture goes.

    layout: "conversations" or "messages" if no other is wanted. Raises BadSample.
    """
    listed = _listed_images(row, keys)
    for key in TURN_KEYS if layout is None else (layout,):
        if row.get(key) is not None:
            return _from_turns(row[key], key, listed)
    if layout is not None:
        raise BadSample(Reason.NO_CONVERSATION, f"there is no {layout!r}, found the keys {sorted(row)}")
    if row.get("texts") is not None:
        return Draft(tuple(_from_pairs(row["texts"])), listed)
    question, answer = _first(row, keys.questions), _first(row, keys.answers)
    if question is None and keys.captions and answer is not None:
        question = ""
    if question is None:
        wanted = ", ".join((*TURN_KEYS, "texts", *keys.questions))
        raise BadSample(Reason.NO_CONVERSATION, f"none of {wanted} is there, found the keys {sorted(row)}")
    return Draft(_from_answer(question, answer), listed)


def place_marks(draft: Draft) -> Draft:
    """Return the draft with as many `<image>` as pictures: in front of the first question if there is none at all.

    A picture may be all of a question, as in captions. Raises BadSample if there are some marks, but not as many as
    pictures.
    """
    num_marks = sum(turn.text.count(IMAGE_MARK) for turn in draft.turns)
    if num_marks == 0 and draft.images:
        marks = f"{IMAGE_MARK}\n" * len(draft.images)
        place = next((i for i, turn in enumerate(draft.turns) if turn.role == "user"), None)
        if place is None:
            raise BadSample(Reason.ROLE_ORDER, "there are pictures, but no question to which they could belong")
        first = Turn("user", (marks + draft.turns[place].text).removesuffix("\n"))
        return Draft((*draft.turns[:place], first, *draft.turns[place + 1 :]), draft.images)
    if num_marks != len(draft.images):
        raise BadSample(Reason.MARKS, f"{num_marks} {IMAGE_MARK} in the text, but {len(draft.images)} pictures")
    return draft


def check_turns(turns: Sequence[Turn]) -> None:
    """Raise BadSample unless users and assistants take turns, all say something, and an answer ends it."""
    for number, turn in enumerate(turns):
        if not turn.text.strip() and turn.role != "system":
            reason = Reason.EMPTY_ANSWER if turn.role == "assistant" else Reason.EMPTY_QUESTION
            raise BadSample(reason, f"turn {number} has no text")
        try:
            turn.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadSample(Reason.NOT_UTF8, f"turn {number}: {error.reason} at character {error.start}") from error
    roles = [turn.role for turn in turns]
    if "assistant" not in roles:
        raise BadSample(Reason.NO_ANSWER, f"only {', '.join(roles) or 'nothing'}")
    spoken = roles[1:] if roles[0] == "system" else roles
    if len(spoken) % 2 or spoken != ["user", "assistant"] * (len(spoken) // 2):
        raise BadSample(Reason.ROLE_ORDER, f"{', '.join(roles)}; wanted: [system,] user, assistant, user, assistant …")


def _listed_images(row: Mapping[str, Any], keys: Keys) -> tuple[Any, ...]:
    """Return what the row itself lists as pictures, None and empty text meaning that there is none."""
    found = _first(row, keys.images)
    if found is None or found == "":
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _from_turns(items: Any, key: str, listed: tuple[Any, ...]) -> Draft:
    """Pictures come in the order of their marks: those that a part names, else the next that the row lists."""
    turns: list[Turn] = []
    placed: list[Any] = []
    waiting = list(listed)
    for number, item in enumerate(_list(items, key)):
        where = f"{key}[{number}]"
        if not isinstance(item, Mapping):
            raise BadSample(Reason.WRONG_TYPE, f"{where} is {_kind(item)}, not an object")
        role = _first(item, ("role", "from"))
        if not isinstance(role, str) or role not in ROLES:
            raise BadSample(Reason.UNKNOWN_ROLE, f"{where}: {role!r:.80}, known are {', '.join(ROLES)}")
        content = _first(item, ("content", "value"))
        if not isinstance(content, (str, list, tuple)):
            raise BadSample(Reason.WRONG_TYPE, f"{where} says {_kind(content)}, neither text nor typed parts")
        pieces = [content] if isinstance(content, str) else [_piece(part, where) for part in content]
        turns.append(Turn(ROLES[role], _join(pieces)))
        for piece in pieces:
            if isinstance(piece, str):
                num_marks = piece.count(IMAGE_MARK)
                placed, waiting = placed + waiting[:num_marks], waiting[num_marks:]
            elif piece.source is not None:
                placed.append(piece.source)
            elif waiting:
                placed.append(waiting.pop(0))
            else:
                raise BadSample(Reason.MARKS, f"{where} wants a picture, but the row lists no more")
    return Draft(tuple(turns), (*placed, *waiting))


def _piece(part: Any, where: str) -> str | _ImagePart:
    """Return a typed part as text or picture."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind not in ("image", "image_url"):
        raise BadSample(Reason.WRONG_TYPE, f"{where} has a part {part!r:.80}; known are text, image and image_url")
    found = _first(part, IMAGE_PART_KEYS)
    return _ImagePart(found["url"] if isinstance(found, Mapping) and found.get("url") is not None else found)


def _join(pieces: Iterable[str | _ImagePart]) -> str:
    """Return one text, a picture as `<image>` on a line of its own."""
    text, after_image = "", False
    for piece in pieces:
        is_image = isinstance(piece, _ImagePart)
        following = IMAGE_MARK if isinstance(piece, _ImagePart) else piece
        beside_image = bool(text and following) and (is_image or after_image)
        text += "\n" if beside_image and not text.endswith("\n") and not following.startswith("\n") else ""
        text += following
        after_image = is_image or (after_image and not following)
    return text


def _from_pairs(pairs: Any) -> Iterable[Turn]:
    for number, pair in enumerate(_list(pairs, "texts")):
        if not isinstance(pair, Mapping):
            raise BadSample(Reason.WRONG_TYPE, f"texts[{number}] is {_kind(pair)}, not an object")
        for role in ("user", "assistant"):
            yield Turn(ROLES[role], _text(pair.get(role), f"texts[{number}].{role}"))


def _from_answer(question: Any, answer: Any) -> tuple[Turn, ...]:
    """Without white space around, as training reads such samples from shards. Of several answers, the first."""
    if isinstance(answer, (list, tuple)) and answer:
        answer = answer[0]
    if answer is None:
        raise BadSample(Reason.NO_ANSWER, "there is a question, but no answer")
    return Turn("user", _text(question, "question").strip()), Turn("assistant", _text(answer, "answer").strip())


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first value that is there, nulls counting as not there."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise BadSample(Reason.WRONG_TYPE, f"{where} is {_kind(value)}, not a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadSample(Reason.WRONG_TYPE, f"{where} is {_kind(value)}, not text")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"
