"""Keys that only have an effect together with another one: fields with `Needs`. docs/flags.md lists them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import reduce
from typing import Any

from llava_mcore.config.flags import name_of
from llava_mcore.config.load import config_fields, excerpt
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.base import Needs

_DEFAULTS = {key: field.default for key, field in config_fields()}
NEEDS = {key: item for key, field in config_fields() for item in field.metadata if isinstance(item, Needs)}


def words_of(needs: Needs) -> str:
    """Return what a key needs, as text: `--save or --save-interval`, `--tp 2 or more`."""
    if needs.words is not None:
        return needs.words
    value = needs.value or (f"{needs.at_least} or more" if needs.at_least is not None else "")
    return " or ".join(f"{name_of(key)} {value}".strip() for key in needs.keys)


def check_needs(run: RunConfig, typed: Collection[str] = ()) -> Iterator[str]:
    """Yield keys that were set but have no effect.

    A key counts as set if its value is not the default, or if it is in `typed`, the keys of flags on the command
    line: a file written by a run contains every key.
    """
    for key, needs in NEEDS.items():
        default, value = _DEFAULTS[key], value_of(run, key)
        if value in needs.idle or (value == default and key not in typed):
            continue
        if not any(needs.accepts(value_of(run, other)) for other in needs.keys):
            name = name_of(key)
            back = "" if value == default or default in (None, False) else f" (key {key}, default {excerpt(default)})"
            yield f"{name} has no effect without {words_of(needs)}: add that, or omit {name}{back}"


def value_of(run: RunConfig, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(lambda section, name: getattr(section, name), key.split("."), run)
