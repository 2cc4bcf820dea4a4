"""The parts of a sample in several files: NNN.jpg, NNN.txt (answer) and NNN.json (question, or a conversation)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from llava_mcore.data.encode.record_keys import TURN_LISTS
from llava_mcore.data.encode.sample_media import (
    AUDIOS_KEY,
    FPS_KEY,
    FRAMES_KEY,
    VIDEOS_KEY,
    is_audio_part,
    listed_videos,
)
from llava_mcore.data.samples import AUDIO_PARTS, IMAGE_PARTS
from llava_mcore.errors import DataError
from llava_mcore.prepare.row_types import BadSample, Reason
from llava_mcore.prepare.sources.lines import decode_row

TEXT_PARTS = ("json", "txt")
MEDIA_PARTS = (*IMAGE_PARTS, *AUDIO_PARTS)
IMAGE_KEYS = ("image", "images")
MOST_NAMES = 5


def is_used(part: str) -> bool:
    """Return whether a part is read, by its suffix; a number or word may come before that."""
    return part.rpartition(".")[2].lower() in (*TEXT_PARTS, *MEDIA_PARTS)


def is_hidden(name: str) -> bool:
    """Return whether a file is none of the user's, such as macOS's twin `._000.jpg` of 000.jpg. `name`: its path."""
    folders, _, file = name.rpartition("/")
    return file.startswith(".") or "__MACOSX" in folders.split("/")


def media_in_order(parts: Iterable[str]) -> list[str]:
    """Return the names of images and audio clips in the order of their numbers (`0.jpg`, `1.png`, …)."""
    names = [part for part in parts if part.rpartition(".")[2].lower() in MEDIA_PARTS]
    return sorted(names, key=lambda part: (int(n) if (n := part.partition(".")[0]).isdecimal() else 0, part))


def not_read(subject: str, counts: Mapping[str, int]) -> str:
    """Return a note about files that belong to no sample, or parts that nothing reads, by name."""
    names = [f"{name} ({count:,})" if count > 1 else name for name, count in Counter(counts).most_common(MOST_NAMES)]
    more = "" if len(counts) <= MOST_NAMES else f" and {len(counts) - MOST_NAMES:,} more names"
    return f"{sum(counts.values()):,} {subject}: {', '.join(names)}{more}"


def row_of(stem: str, texts: Mapping[str, bytes], media: Mapping[str, Any]) -> dict[str, Any] | BadSample:
    """Return a row with question, answer, images, videos and audio clips; messages are unchanged.

    media: bytes or path of each image and audio part, by its name; frames are the parts that "videos" lists.
    """
    # The json is the row; parts beside it are its media and its answer.
    if "json" not in texts:
        there = f", only .{', .'.join(sorted({*texts, *media}))}" if texts or media else ""
        return BadSample(Reason.NO_CONVERSATION, f"{stem} has no .json{there}")
    row = decode_row(texts["json"])
    if isinstance(row, BadSample):
        return row
    try:
        listed = listed_videos(row.get(VIDEOS_KEY))
    except DataError as error:
        return BadSample(Reason.WRONG_TYPE, str(error))
    has_turns = any(row.get(key) is not None for key in TURN_LISTS)
    if not media and not listed and not has_turns:
        return BadSample(Reason.IMAGE_MISSING, f"{stem} has no image or audio clip beside its .json")
    # Frames that the json lists are not separate images.
    frames = {name for video in listed for name in video.frames}
    audios = {name: item for name, item in media.items() if is_audio_part(name)}
    images = [image for name, image in media.items() if name not in frames and name not in audios]
    result: dict[str, Any] = {}
    if images:  # else the row may name images that are files
        row = {key: value for key, value in row.items() if key not in IMAGE_KEYS}
        result["images"] = images
    if listed:  # a name that is not a part is a path
        result[VIDEOS_KEY] = [
            {FRAMES_KEY: [media.get(name, name) for name in video.frames], FPS_KEY: video.fps} for video in listed
        ]
    order = row.get(AUDIOS_KEY)
    if audios:  # in the order of the json, or of their numbers
        result[AUDIOS_KEY] = [media.get(name, name) for name in (order if isinstance(order, list) else audios)]
    # The answer, if it stands in a file of its own.
    if "txt" in texts:
        try:
            result["answer"] = texts["txt"].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return BadSample(Reason.NOT_UTF8, f"{stem}.txt: {error.reason} at byte {error.start}")
    return {"id": stem} | row | result
