"""The keys of rows, turns and parts: which are honored, which make a row unusable, and which are ignored on purpose.

`prepare`, `check` and training use the same tables. Keys in none of them are counted and reported as not used,
so that nothing in a user's data is dropped silently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llava_mcore.errors import DataError

LOSS_KEYS = frozenset(
    ("loss", "loss_mask", "loss_weight", "loss_scale", "weight", "train", "training", "trainable", "trained")
) | frozenset(("train_on", "is_trained", "compute_loss", "learn"))
"""Whether an answer (or the answers of a row) is trained: 1 or true, 0 or false."""
NEGATED_LOSS_KEYS = frozenset(("masked", "ignore_loss", "no_loss", "skip_loss", "mask_loss"))
"""The same with the opposite meaning."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
SYSTEM_KEYS = ("system", "system_prompt")
TOOLS_KEYS = ("tools", "functions")
TURN_LISTS = ("conversations", "messages")
CHOSEN, REJECTED = "chosen", "rejected"
PAIR = (CHOSEN, REJECTED)
"""Answers to one question of which the first is preferred."""
REJECTED_KEYS = ("rejected_response", "rejected_messages")
"""Fields with the rejected answer of a row that has the chosen one as any other row has its answer."""
REJECTED_IMAGES = "rejected_images"
OBJECTS_KEY, HISTORY_KEY, INPUT_KEY = "objects", "history", "input"
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
SIZE_KEYS = ("resized_height", "resized_width", "min_pixels", "max_pixels", "total_pixels")
"""Options of one image by qwen-vl-utils' names: what it is resized to."""
CLIP_KEYS = {
    "fps": ("fps", "sample_fps"),
    "num_frames": ("nframes", "num_frames"),
    "min_frames": ("min_frames",),
    "max_frames": ("max_frames",),
    "start": ("video_start", "start_time", "start"),
    "end": ("video_end", "end_time", "end"),
}
"""Options of one video, which frames are taken, and the spellings of each."""
IMAGE_OPTIONS = frozenset((*SIZE_KEYS, "detail"))
VIDEO_OPTIONS = frozenset((*SIZE_KEYS, *(key for spellings in CLIP_KEYS.values() for key in spellings)))


class DifferingError(DataError):
    """Two fields with the same meaning but different values."""


class NothingTrainedError(DataError):
    """A conversation with no answer to train."""


@dataclass(frozen=True, slots=True)
class RefusedKey:
    """Why a key makes a row unusable, and values with which it changes nothing."""

    why: str
    neutral: tuple[Any, ...] = ()
    only: tuple[Any, ...] = ()
    """If given, only these values make a row unusable. With others, the key is reported as not used."""


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The keys of one level."""

    level: str
    """Appended to a key's name in reports."""
    honored: frozenset[str]
    refused: Mapping[str, RefusedKey] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def check(self, record: Mapping[str, Any], where: str = "") -> None:
        """Raise DataError if the record has keys that change its meaning and cannot be honored."""
        keys = [key for key, value in record.items() if key in self.refused and self._matters(key, value)]
        if keys:
            reasons = "; ".join(f"`{key}`: {record[key]!r:.60} ({self.refused[key].why})" for key in keys)
            raise DataError(f"{where}{': ' if where else ''}{reasons}")

    def unused(self, record: Mapping[str, Any], honored: Collection[str] = ()) -> list[str]:
        """Return the names of full keys that nothing reads. honored: keys that are read although not in the table."""
        known = self.honored | {key for key, refused in self.refused.items() if not refused.only} | self.ignored
        names = (str(key) for key, value in record.items() if is_full(value))
        return [f"`{name:.60}`{self.level}" for name in names if name not in known and name not in honored]

    def _matters(self, key: str, value: Any) -> bool:
        refused = self.refused[key]
        if refused.only:
            return any(value is x for x in refused.only)
        return is_full(value) and not any(value is x or value == x for x in refused.neutral)


_OF_ROW = RefusedKey("write it beside the reference to the image or video that it is for")

ROW = KeyTable(
    level="",
    honored=LOSS_KEYS
    | NEGATED_LOSS_KEYS
    | frozenset((*SYSTEM_KEYS, *TOOLS_KEYS, HISTORY_KEY, "id", "pack", "txt", "__key__")),
    refused={
        **dict.fromkeys((*SIZE_KEYS, "nframes", "min_frames", "max_frames", "video_start", "video_end"), _OF_ROW),
        "mask": RefusedKey("which roles are masked; write `loss: false` to turns instead", ("User", "user", "human")),
        "roles_to_train": RefusedKey("write `loss: false` to turns instead", (["assistant"], ["gpt"], "assistant")),
        "chat_template": RefusedKey("give it with --chat-template"),
        "chat_template_kwargs": RefusedKey("arguments of the chat template are not supported"),
        "documents": RefusedKey("documents for the chat template are not supported"),
        "kto_tag": RefusedKey("an answer that must not be learned", (True,)),
        "label": RefusedKey("an answer that must not be learned", only=(False,)),
    },
    ignored=frozenset(
        (
            *("source", "metadata", "meta", "meta_info", "dataset", "data_source", "dataset_name", "split", "license"),
            *("image_sizes", "num_tokens", "prepared_tokens", "audio_seconds", "width", "height", "image_size"),
            *("idx", "index", "uuid", "key", "uid", "image_id", "question_id", "sample_id", "conversation_id"),
            *("url", "lang", "language", "category", "topic", "task", "timestamp", "created", "model", "file_name"),
            *("__sources__", "__restore_key__", "__subflavors__", "__index_level_0__"),
        )
    ),
)

TURN = KeyTable(
    level=" of turns",
    honored=LOSS_KEYS
    | NEGATED_LOSS_KEYS
    | frozenset((*REASONING_KEYS, "role", "from", "content", "value", "tool_calls", "function_call"))
    | frozenset(("tool_call_id", "name")),
    refused={
        "mask": RefusedKey("it may mean trained or not trained; write `loss: false` or `loss: true`"),
        "train_detail": RefusedKey("parts of an answer cannot be trained"),
        "training_detail": RefusedKey("parts of an answer cannot be trained"),
        "prefix": RefusedKey("an answer cannot be continued", (False,)),
        "refusal": RefusedKey("write it as content"),
        **{key: RefusedKey("list it beside the turns, or as a typed part") for key in MEDIA_KEYS},
    },
    ignored=frozenset(("id", "source", "timestamp", "created", "model", "uuid", "annotations", "metadata", "turn")),
)

PART = KeyTable(
    level=" of parts",
    honored=frozenset(("type", "text", "url", "path", "thinking", "reasoning", "frames", "bytes", "base64"))
    | frozenset((*MEDIA_KEYS, "image_url", "video_url", "audio_url", "input_audio"))
    | IMAGE_OPTIONS
    | VIDEO_OPTIONS,
    refused={
        "raw_fps": RefusedKey("write `fps`: the number of the listed frames per second"),
    },
    ignored=frozenset(("cache_control", "id", "index", "annotations", "signature", "file_name", "name")),
)


def is_full(value: Any) -> bool:
    """Return whether a value has contents: it is not null or empty, nor a structure of only such values."""
    if value is None or (isinstance(value, (str, bytes)) and not value):
        return False
    if isinstance(value, Mapping):
        return any(is_full(item) for item in value.values())
    return not isinstance(value, (list, tuple)) or any(is_full(item) for item in value)


def full_value(record: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the value of the only full key, or the first value that is not null if none is full.

    Raises DifferingError if two of the keys are full and differ.
    """
    keys = tuple(keys)
    full = [key for key in keys if is_full(record.get(key))]
    if not full:
        return next((record[key] for key in keys if record.get(key) is not None), None)
    values = [_as_list(record[key]) for key in full]
    for key, value in zip(full[1:], values[1:], strict=True):
        if value != values[0]:
            raise DifferingError(f"`{full[0]}` and `{key}` differ: {record[full[0]]!r:.60} and {record[key]!r:.60}")
    return record[full[0]]


def _as_list(value: Any) -> list[Any]:
    """Return a value such that `image: x` and `images: [x]` are equal."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


TEXT_KEYS = ("answer", "text", "value")
"""Keys of an answer that is an object, such as VQAv2's {"answer", "answer_confidence", "answer_id"}."""


def majority(answers: Sequence[Any]) -> Any:
    """Return the most frequent answer, ignoring case and surrounding white space; the first of equally frequent ones.

    Answers are texts, or objects with a text under one of TEXT_KEYS. None if there is none.
    """
    texts = [_answer_text(answer) for answer in answers]
    full = [text for text in texts if isinstance(text, str) and text.strip()]
    if not full:
        return texts[0] if texts else None
    counts = Counter(text.strip().lower() for text in full)
    best = max(counts.values())
    return next(text for text in full if counts[text.strip().lower()] == best)


def _answer_text(answer: Any) -> Any:
    if isinstance(answer, Mapping):
        return next((answer[key] for key in TEXT_KEYS if answer.get(key) is not None), None)
    return answer


def decoded(value: Any) -> Any:
    """Return a list or object that was stored as JSON text; everything else is unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
