"""The json of a sample as it was read: the answers of a preference pair, and keys that nothing reads."""

from __future__ import annotations

from typing import Any

from llava_mcore.data.encode.record_keys import PAIR, ROW, TURN

READ = ("messages", "question", "images", "videos", "audios")
"""Keys of a shard's json, besides those of a row."""


def sides_of(raw: Any) -> dict[str, Any]:
    """Return the sample for each of its answers, by its name; a sample that is not a pair by the name "".

    Each answer is checked as a conversation of its own, about the same images, videos and audio clips.
    """
    about = raw.get("json") if isinstance(raw, dict) else None
    if not isinstance(about, dict) or not all(isinstance(about.get(key), dict) for key in PAIR):
        return {"": raw}
    shared = {key: value for key, value in about.items() if key not in PAIR}
    return {key: {**raw, "json": {**shared, **about[key]}} for key in PAIR}


def unused_keys(raw: Any) -> tuple[str, ...]:
    """Return the keys of a raw sample's json that nothing reads, each once, as `prepare` reports them."""
    about = raw.get("json") if isinstance(raw, dict) else None
    if not isinstance(about, dict):
        return ()
    pack = about.get("pack")
    names: dict[str, None] = {}
    for member in [about, *(pack if isinstance(pack, list) else ())]:
        names |= dict.fromkeys(ROW.unused(member, READ))
        messages = member.get("messages")
        for message in messages if isinstance(messages, list) else ():
            names |= dict.fromkeys(TURN.unused(message))
    return tuple(names)
