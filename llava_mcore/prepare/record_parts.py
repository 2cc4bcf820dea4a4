"""The content of a turn -> text with marks, and references to images, videos and audio. No file is opened here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llava_mcore.data.encode.marks import NAMES, TYPES, count_marks, escape
from llava_mcore.data.encode.messages import as_records
from llava_mcore.data.encode.record_keys import IMAGE_OPTIONS, PART, VIDEO_OPTIONS, decoded, full_value, is_full
from llava_mcore.data.encode.sample_media import FRAMES_KEY
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import with_article
from llava_mcore.prepare.media.arrays import is_array
from llava_mcore.prepare.row_types import FRAMES_FORM, BadSample, Draft, Reason, reason_for, type_and_value

MARKS = {
    **{"image": IMAGE_MARK, "image_url": IMAGE_MARK, "video": VIDEO_MARK, "video_url": VIDEO_MARK},
    **{"audio": AUDIO_MARK, "audio_url": AUDIO_MARK},
}
"""Types of typed parts."""
REASONINGS = ("thinking", "reasoning")
"""Types of parts with what an assistant thinks."""
PART_KEYS = {
    IMAGE_MARK: ("image_url", "image", "url", "path", "base64"),
    VIDEO_MARK: ("video_url", "video", "url", "path", "base64", FRAMES_KEY),
    AUDIO_MARK: ("audio_url", "audio", "url", "path", "base64"),
}
"""Keys of a typed part that may refer to its image, video or audio clip."""
OPTIONS = {IMAGE_MARK: IMAGE_OPTIONS, VIDEO_MARK: VIDEO_OPTIONS}
"""Keys of a typed part that say how its image or video is read."""
TAG = re.compile(r"<img>[^<>\n]+\.(?:jpe?g|png|webp|bmp|gif)</img>", re.IGNORECASE)
"""An image as the first Qwen-VL's data name it in a text."""
ASKING = ("user", "tool")
"""Roles in whose text marks stand for media."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, video or audio clip among typed parts."""

    mark: str
    source: Any
    """The part's reference to it; None: the next one that the row lists."""


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The content of a turn: text, and media between it."""

    pieces: tuple[str | MediaPart, ...]
    reasoning: str = ""
    unused: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One text, with images, videos and audio clips as marks on their own lines."""
        text, after_media = "", False
        for piece in self.pieces:
            is_media = isinstance(piece, MediaPart)
            following = piece.mark if isinstance(piece, MediaPart) else piece
            beside_media = bool(text and following) and (is_media or after_media)
            text += "\n" if beside_media and not text.endswith("\n") and not following.startswith("\n") else ""
            text += following
            after_media = is_media or (after_media and not following)
        return text


@dataclass(slots=True)
class RowMedia:
    """References of a row by mark: those of the row's own fields, and those that have their position."""

    listed: Mapping[str, Sequence[Any]]
    untaken: Collection[str] = ()
    """Marks of media that the model does not take: text, unless the row has such media."""
    placed: dict[str, list[Any]] = field(init=False)
    waiting: dict[str, list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.placed = {mark: [] for mark in self.listed}
        self.waiting = {mark: list(media) for mark, media in self.listed.items()}

    def place(self, piece: str | MediaPart, where: str) -> None:
        """Move what a piece of a turn names, or has marks for, from what waits to what is placed."""
        if isinstance(piece, str):
            for mark in self.placed:
                num_marks = piece.count(mark)
                self.placed[mark].extend(self.waiting[mark][:num_marks])
                del self.waiting[mark][:num_marks]
        elif piece.source is not None:
            self.placed[piece.mark].append(piece.source)
        elif self.waiting[piece.mark]:
            self.placed[piece.mark].append(self.waiting[piece.mark].pop(0))
        else:
            name = with_article(NAMES[piece.mark])
            raise BadSample(
                Reason.MARKS,
                f"{where} wants {name}, but its part has none of {', '.join(PART_KEYS[piece.mark])}, and the row lists "
                "no more",
            )

    def all(self) -> dict[str, tuple[Any, ...]]:
        """Return everything: first what has its position."""
        return {mark: (*self.placed[mark], *self.waiting[mark]) for mark in self.listed}


def as_parts(content: Any) -> Any:
    """Return content as a list of typed parts, also if it is one part or JSON text of them; else unchanged."""
    value = decoded(content)
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, (list, tuple)):
        return content
    if isinstance(content, str) and not (listed and all(_is_part(part) for part in listed)):
        return content  # a text that is JSON
    return listed


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind in MARKS or kind in REASONINGS or (kind == "text" and isinstance(part.get("text"), str))


def read_content(content: str | Sequence[Any], where: str, literal: Sequence[str]) -> TurnContent:
    """Return the content of a turn. literal: marks that are text wherever they are written. Raises BadSample."""
    if isinstance(content, str):
        return TurnContent((escape(content, literal),))
    pieces: list[str | MediaPart] = []
    thoughts: list[str] = []
    unused: list[str] = []
    for part in content:
        piece = _piece(part, where)
        assert isinstance(part, Mapping)  # `_piece` refuses everything else
        unused += PART.unused(part)
        if part["type"] in REASONINGS:
            thoughts.append(str(piece))
        else:
            pieces.append(escape(piece, literal) if isinstance(piece, str) else piece)
    return TurnContent(tuple(pieces), "\n".join(thoughts), tuple(unused))


def refuse_marks(text: str, role: str, where: str, untaken: Collection[str] = ()) -> None:
    """Raise BadSample for marks in the text of a turn that is not a question. untaken: see `RowMedia`."""
    marks = [mark for mark in TYPES if mark in text and mark not in untaken] if role not in ASKING else []
    if marks:
        raise BadSample(
            Reason.MARKS,
            f"{where}, of the {role}, has {marks[0]}: marks stand for media in questions only; if it is text, write "
            f"{escape(marks[0])}",
        )


def place_marks(draft: Draft) -> Draft:
    """Return the draft with as many `<image>` as images, `<video>` as videos and `<audio>` as audio clips.

    Those of which there is no mark at all get theirs in front of the first question, which may then be nothing else, as
    in captions. Rows with videos and no images may have `<image>` as the mark of videos, as LLaVA-Video's have.
    Raises BadSample if there are some marks, but not as many as media.
    """
    draft = _own_marks_for_videos(draft)
    tags = [] if draft.images else [tag for turn in draft.turns for tag in TAG.findall(turn.text)]
    if tags:
        raise BadSample(Reason.MARKS, f"{tags[0]:.80} is an image: write <image> there, and list it in `images`")
    missing = ""
    for mark, media in ((IMAGE_MARK, draft.images), (VIDEO_MARK, draft.videos), (AUDIO_MARK, draft.audios)):
        num_marks = count_marks(draft.turns, mark)
        if num_marks == 0:
            missing += f"{mark}\n" * len(media)
        elif num_marks != len(media):
            hint = _hint_of_marks(mark, num_marks, media)
            raise BadSample(Reason.MARKS, f"{num_marks} {mark} in the text, but {len(media)} {NAMES[mark]}s{hint}")
    if not missing:
        return draft
    index = next((i for i, turn in enumerate(draft.turns) if turn.role == "user"), None)
    if index is None:
        raise BadSample(Reason.ROLE_ORDER, "there are images, videos or audio clips, but no question for them")
    turn = draft.turns[index]
    first = replace(turn, text=(missing + turn.text).removesuffix("\n"))
    return replace(draft, turns=(*draft.turns[:index], first, *draft.turns[index + 1 :]))


def _hint_of_marks(mark: str, num_marks: int, media: Sequence[Any]) -> str:
    """Return what to do about a number of marks that is not that of the media."""
    if not media:
        return f"; if it is text, write {escape(mark)}"
    if mark == VIDEO_MARK and num_marks < len(media):
        return f"; {FRAMES_FORM}"
    return ""


def _own_marks_for_videos(draft: Draft) -> Draft:
    """Return the draft with `<video>` for `<image>` where that can only stand for its videos."""
    is_meant = draft.videos and not draft.images and count_marks(draft.turns, VIDEO_MARK) == 0
    if not is_meant or count_marks(draft.turns, IMAGE_MARK) != len(draft.videos):
        return draft

    def with_video_mark(turn: Turn) -> Turn:
        return replace(turn, text=turn.text.replace(IMAGE_MARK, VIDEO_MARK))

    return replace(draft, turns=tuple(map(with_video_mark, draft.turns)))


def listed_media(row: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    """Return the images, videos or audio clips that the row lists; empty values mean that there is none."""
    with reason_for(Reason.WRONG_TYPE):
        value = _listed_references(decoded(full_value(row, names)))
    has_lists = isinstance(value, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in value)
    if not is_full(value) and not has_lists:  # a list without frames is a video, and refused later
        return ()
    listed = tuple(value) if isinstance(value, (list, tuple)) and not is_array(value) else (value,)
    for index, item in enumerate(listed):
        if isinstance(item, Mapping):
            _check_keys(item, f"the row's medium {index}")
    return listed


def _listed_references(value: Any) -> Any:
    """Return references whose bytes and paths are one list each as a list of references. One of a video is a list."""
    is_columns = isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}
    return as_records(value) if is_columns else value


def _piece(part: Any, where: str) -> str | MediaPart:
    """Return a typed part as text, image, video or audio clip."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _check_keys(part, where)
        return part["text"]
    if kind in REASONINGS and isinstance(thought := full_value(part, (kind, "text")), str):
        _check_keys(part, where)
        return thought
    if kind not in MARKS:
        raise BadSample(Reason.WRONG_TYPE, f"{where} has a part {part!r:.80}; allowed: text, {', '.join(MARKS)}")
    return _media_part(part, MARKS[kind], where)


def _media_part(part: Mapping[str, Any], mark: str, where: str) -> MediaPart:
    with reason_for(Reason.WRONG_TYPE):
        source = full_value(part, PART_KEYS[mark])
    _check_keys(part, where)
    options = _options(part, mark, where)
    if isinstance(source, Mapping) and source.get("url") is not None:
        _check_keys(source, where)
        options |= _options(source, mark, where)
        source = source["url"]
    if isinstance(source, (str, bytes)) and not source:
        source = None
    if mark == VIDEO_MARK and isinstance(source, (list, tuple)):
        return MediaPart(mark, {FRAMES_KEY: source, **options})
    return MediaPart(mark, _with_options(source, options, where) if options else source)


def _options(part: Mapping[str, Any], mark: str, where: str) -> dict[str, Any]:
    """Return what a part says about how its image or video is read."""
    allowed = OPTIONS.get(mark, frozenset())
    full = {key: part[key] for key in part if key in IMAGE_OPTIONS | VIDEO_OPTIONS and is_full(part[key])}
    others = ", ".join(f"`{key}`" for key in full if key not in allowed)
    if others:
        raise BadSample(Reason.KEY, f"{where}: {others} beside {with_article(NAMES[mark])}, which has no such option")
    return full


def _with_options(source: Any, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a reference as an object that has options too."""
    if source is None:
        keys = ", ".join(f"`{key}`" for key in options)
        raise BadSample(Reason.KEY, f"{where}: {keys} must be beside the reference that the row lists")
    if isinstance(source, Mapping):
        return {**source, **options}
    return {"bytes" if isinstance(source, (bytes, bytearray)) else "path": source, **options}


def _check_keys(part: Mapping[str, Any], where: str) -> None:
    with reason_for(Reason.KEY):
        PART.check(part, where)


def list_of(value: Any, where: str) -> Sequence[Any]:
    """Return a list. Raises BadSample for anything else."""
    if not isinstance(value, (list, tuple)):
        raise BadSample(Reason.WRONG_TYPE, f"{where} is {type_and_value(value)}, not a list")
    return value
