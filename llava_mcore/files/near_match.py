"""Finds the file that a path was probably meant to name, for messages about a missing one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from unicodedata import normalize
from urllib.parse import unquote

from llava_mcore.errors import DataError

MOST_ENTRIES = 200_000
"""Entries of a folder to compare; a larger folder is not searched."""
SHOWN_CHARS = 120
_SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "backslashes": lambda text: text.replace("\\", "/"),
    "percent signs": unquote,
    "Unicode form": partial(normalize, "NFC"),  # macOS decomposes é into two characters
    "case": str.casefold,
    "blanks": lambda text: "/".join(part.strip() for part in text.split("/")),
}
"""How one name may be written, and functions that undo it."""


def require_exists(path: Path) -> None:
    """Raise DataError if nothing has this path."""
    if not path.exists():
        raise DataError(f"{path} does not exist{near_hint(path)}")


def near_hint(path: Path) -> str:
    """Return the end of a message about a file that cannot be opened: the one that was probably meant, or nothing."""
    match = near_match(path)
    return "" if match is None else f"; there is {shortened(str(match))}, which differs in {differences(path, match)}"


def near_match(path: Path) -> Path | None:
    """Return a file whose path differs from a missing one only in how it is written; None if there is none."""
    match = Path(path.anchor)
    for name in _spelled(str(path)[len(path.anchor) :], only="backslashes").split("/"):
        entry = name if os.path.lexists(match / name) else _entries(match).get(_spelled(name))
        if entry is None:
            return None
        match /= entry
    return match if match.is_file() and match != path else None


def differences(path: Path, match: Path) -> str:
    """Return what two spellings of a path differ in: what else it is than all the rest."""
    rest = (name for name in _SPELLINGS if _spelled(str(path), but=name) != _spelled(str(match), but=name))
    return " and ".join(rest)


def shortened(text: str) -> str:
    """Return a path, or the data that is in its place, as messages show it: its beginning and end."""
    half = SHOWN_CHARS // 2
    return text if len(text) <= SHOWN_CHARS else f"{text[:half]}…{text[1 - half :]}"


def _spelled(text: str, *, only: str | None = None, but: str | None = None) -> str:
    """Return a text in one spelling. only, but: the one function to use, or not to use."""
    for name, undo in _SPELLINGS.items():
        text = text if name == but or only not in (None, name) else undo(text)
    return text


@lru_cache(maxsize=16)
def _entries(folder: Path) -> dict[str, str]:
    """Return the names in a folder by their one spelling. Cached, because many paths may be missing."""
    names: dict[str, str] = {}
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count == MOST_ENTRIES:
                    return {}
                names.setdefault(_spelled(entry.name), entry.name)
    except (OSError, ValueError):  # not a folder, or not a valid name
        return {}
    return names
