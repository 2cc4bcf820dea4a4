"""A row's dictionary -> turns and references to pictures, videos and sounds. No file is opened here.

Known layouts, distinguished by their keys: `conversations` or `messages` (lists of turns, `from`/`value` or
`role`/`content`, content as text or in typed parts), `texts` (lists of user/assistant pairs), and question with answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llava_mcore.data.encoding.marks import NAMES, count_marks
from llava_mcore.data.encoding.sample_media import FPS_KEY, FRAMES_KEY
from llava_mcore.data.prepare.row_types import BadSample, Draft, Reason, type_and_value
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn

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
MARKS = {
    **{"image": IMAGE_MARK, "image_url": IMAGE_MARK, "video": VIDEO_MARK, "video_url": VIDEO_MARK},
    **{"audio": AUDIO_MARK, "audio_url": AUDIO_MARK},
}
"""Types of typed parts."""
PART_KEYS = {
    IMAGE_MARK: ("image_url", "image", "url", "path"),
    VIDEO_MARK: ("video_url", "video", "url", "path", FRAMES_KEY),
    AUDIO_MARK: ("audio_url", "audio", "url", "path"),
}
"""Keys of a typed part that may refer to its picture, video or sound."""


@dataclass(frozen=True, slots=True)
class _MediaPart:
    """A picture, video or sound among typed parts."""

    mark: str
    source: Any
    """The part's reference to it; None: the next one that the row lists."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a row's fields; None: the default names."""

    image: str | None = None
    question: str | None = None
    answer: str | None = None
    captions: bool = False
    """Answers may have no question: the picture is the question."""
    video: str | None = None
    audio: str | None = None

    @property
    def images(self) -> tuple[str, ...]:
        """Fields that may contain pictures."""
        return ("image", "images") if self.image is None else (self.image,)

    @property
    def videos(self) -> tuple[str, ...]:
        """Fields that may contain videos."""
        return ("video", "videos") if self.video is None else (self.video,)

    @property
    def audios(self) -> tuple[str, ...]:
        """Fields that may contain sounds."""
        return ("audio", "audios") if self.audio is None else (self.audio,)

    @property
    def questions(self) -> tuple[str, ...]:
        """Fields that may contain the question."""
        return ("question",) if self.question is None else (self.question,)

    @property
    def answers(self) -> tuple[str, ...]:
        """Fields that may contain the answer."""
        return ("answer", "answers") if self.answer is None else (self.answer,)

    def all(self) -> frozenset[str]:
        """Return every field that is read."""
        media = (*self.images, *self.videos, *self.audios)
        return frozenset((*TURN_KEYS, "texts", "id", *media, *self.questions, *self.answers))


def parse(row: Mapping[str, Any], keys: Keys, layout: str | None = None) -> Draft:
    """Return the turns and media of a row, with `<image>`, `<video>` and `<audio>` in their positions.

    layout: "conversations" or "messages" to accept no other. Raises BadSample.
    """
    names = {IMAGE_MARK: keys.images, VIDEO_MARK: keys.videos, AUDIO_MARK: keys.audios}
    listed = {mark: _listed(row, of_mark) for mark, of_mark in names.items()}
    for key in TURN_KEYS if layout is None else (layout,):
        if row.get(key) is not None:
            return _from_turns(row[key], key, listed)
    if layout is not None:
        raise BadSample(Reason.NO_CONVERSATION, f"there is no {layout!r}, found the keys {sorted(row)}")
    if row.get("texts") is not None:
        return _draft(_from_pairs(row["texts"]), listed)
    question, answer = _first(row, keys.questions), _first(row, keys.answers)
    if question is None and keys.captions and answer is not None:
        question = ""
    if question is None:
        own = keys.answers if keys.captions else keys.questions
        wanted, flag = ", ".join((*TURN_KEYS, "texts", *own)), "--answer-key" if keys.captions else "--question-key"
        message = f"none of {wanted} exists ({flag} names another), found, of the keys that are read, {sorted(row)}"
        raise BadSample(Reason.NO_CONVERSATION, message)
    return _draft(_from_answer(question, answer), listed)


def _draft(turns: Iterable[Turn], media: Mapping[str, Sequence[Any]]) -> Draft:
    """Return a draft of turns and media by their mark."""
    return Draft(tuple(turns), *(tuple(media[mark]) for mark in (IMAGE_MARK, VIDEO_MARK, AUDIO_MARK)))


def place_marks(draft: Draft) -> Draft:
    """Return the draft with as many `<image>` as pictures, `<video>` as videos and `<audio>` as sounds.

    Those of which there is no mark at all get theirs in front of the first question, which may then be nothing else, as
    in captions. Rows with videos and no pictures may have `<image>` as the mark of videos, as LLaVA-Video's have.
    Raises BadSample if there are some marks, but not as many as media.
    """
    draft = _own_marks_for_videos(draft)
    missing = ""
    for mark, media in ((IMAGE_MARK, draft.images), (VIDEO_MARK, draft.videos), (AUDIO_MARK, draft.audios)):
        num_marks = count_marks(draft.turns, mark)
        if num_marks == 0:
            missing += f"{mark}\n" * len(media)
        elif num_marks != len(media):
            raise BadSample(Reason.MARKS, f"{num_marks} {mark} in the text, but {len(media)} {NAMES[mark]}s")
    if not missing:
        return draft
    index = next((i for i, turn in enumerate(draft.turns) if turn.role == "user"), None)
    if index is None:
        raise BadSample(Reason.ROLE_ORDER, "there are pictures, videos or sounds, but no question for them")
    first = Turn("user", (missing + draft.turns[index].text).removesuffix("\n"))
    return replace(draft, turns=(*draft.turns[:index], first, *draft.turns[index + 1 :]))


def _own_marks_for_videos(draft: Draft) -> Draft:
    """Return the draft with `<video>` for `<image>` where that can only stand for its videos."""
    is_meant = draft.videos and not draft.images and count_marks(draft.turns, VIDEO_MARK) == 0
    if not is_meant or count_marks(draft.turns, IMAGE_MARK) != len(draft.videos):
        return draft
    return replace(
        draft, turns=tuple(replace(turn, text=turn.text.replace(IMAGE_MARK, VIDEO_MARK)) for turn in draft.turns)
    )


def check_turns(turns: Sequence[Turn]) -> None:
    """Raise BadSample unless users and assistants take turns, no turn is empty, and the last one is an answer."""
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


def _listed(row: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    """Return the pictures, videos or sounds that the row lists; None and empty text mean that there is none."""
    found = _first(row, names)
    if found is None or found == "":
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _from_turns(items: Any, key: str, listed: Mapping[str, tuple[Any, ...]]) -> Draft:
    """Return turns and media in the order of their marks: the part's own reference, else the next one of the row.

    listed: by their mark.
    """
    turns: list[Turn] = []
    placed: dict[str, list[Any]] = {mark: [] for mark in listed}
    waiting = {mark: list(media) for mark, media in listed.items()}
    for number, item in enumerate(_list(items, key)):
        where = f"{key}[{number}]"
        if not isinstance(item, Mapping):
            raise BadSample(Reason.WRONG_TYPE, f"{where} is {type_and_value(item)}, not an object")
        role = _first(item, ("role", "from"))
        if not isinstance(role, str) or role not in ROLES:
            raise BadSample(Reason.UNKNOWN_ROLE, f"{where}: {role!r:.80}; allowed: {', '.join(ROLES)}")
        content = _first(item, ("content", "value"))
        if not isinstance(content, (str, list, tuple)):
            raise BadSample(Reason.WRONG_TYPE, f"{where} says {type_and_value(content)}, neither text nor typed parts")
        pieces = [content] if isinstance(content, str) else [_piece(part, where) for part in content]
        turns.append(Turn(ROLES[role], _join(pieces)))
        for piece in pieces:
            _place(piece, placed, waiting, where)
    return _draft(turns, {mark: (*placed[mark], *waiting[mark]) for mark in listed})


def _place(
    piece: str | _MediaPart, placed: Mapping[str, list[Any]], waiting: Mapping[str, list[Any]], where: str
) -> None:
    """Move what a piece of a turn names, or has marks for, from what waits to what is placed."""
    if isinstance(piece, str):
        for mark in placed:
            num_marks = piece.count(mark)
            placed[mark].extend(waiting[mark][:num_marks])
            del waiting[mark][:num_marks]
    elif piece.source is not None:
        placed[piece.mark].append(piece.source)
    elif waiting[piece.mark]:
        placed[piece.mark].append(waiting[piece.mark].pop(0))
    else:
        raise BadSample(Reason.MARKS, f"{where} wants a {NAMES[piece.mark]}, but the row lists no more")


def _piece(part: Any, where: str) -> str | _MediaPart:
    """Return a typed part as text, picture, video or sound."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind not in MARKS:
        raise BadSample(Reason.WRONG_TYPE, f"{where} has a part {part!r:.80}; allowed: text, {', '.join(MARKS)}")
    mark = MARKS[kind]
    found = _first(part, PART_KEYS[mark])
    if isinstance(found, Mapping) and found.get("url") is not None:
        found = found["url"]
    if mark == VIDEO_MARK and isinstance(found, (list, tuple)):
        found = {FRAMES_KEY: found, FPS_KEY: part.get(FPS_KEY)}
    return _MediaPart(mark, found)


def _join(pieces: Iterable[str | _MediaPart]) -> str:
    """Return one text, with pictures, videos and sounds as marks on their own lines."""
    text, after_media = "", False
    for piece in pieces:
        is_media = isinstance(piece, _MediaPart)
        following = piece.mark if isinstance(piece, _MediaPart) else piece
        beside_media = bool(text and following) and (is_media or after_media)
        text += "\n" if beside_media and not text.endswith("\n") and not following.startswith("\n") else ""
        text += following
        after_media = is_media or (after_media and not following)
    return text


def _from_pairs(pairs: Any) -> Iterable[Turn]:
    for number, pair in enumerate(_list(pairs, "texts")):
        if not isinstance(pair, Mapping):
            raise BadSample(Reason.WRONG_TYPE, f"texts[{number}] is {type_and_value(pair)}, not an object")
        for role in ("user", "assistant"):
            yield Turn(ROLES[role], _text(pair.get(role), f"texts[{number}].{role}"))


def _from_answer(question: Any, answer: Any) -> tuple[Turn, ...]:
    """Return question and answer without surrounding white space, as in training. The first answer if there are
    several."""
    if isinstance(answer, (list, tuple)) and answer:
        answer = answer[0]
    if answer is None:
        raise BadSample(Reason.NO_ANSWER, "there is a question, but no answer")
    return Turn("user", _text(question, "question").strip()), Turn("assistant", _text(answer, "answer").strip())


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first value that is not missing or null."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise BadSample(Reason.WRONG_TYPE, f"{where} is {type_and_value(value)}, not a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadSample(Reason.WRONG_TYPE, f"{where} is {type_and_value(value)}, not text")
    return value
