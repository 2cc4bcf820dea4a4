"""Keys of a sample's json that nothing reads."""

from __future__ import annotations

from typing import Any

from llava_mcore.data.encode.record_keys import ROW, TURN

READ = ("messages", "question", "images", "videos", "audios")
"""Keys of a shard's json, besides those of a row."""


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
