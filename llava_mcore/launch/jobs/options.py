"""`--job-options FILE`: further fields of a job, which are merged into what is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from llava_mcore.config.documents import read_document
from llava_mcore.errors import ConfigError


def read_options(file: Path | None, sections: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the sections of an options file; {} without one.

    Raises:
        ConfigError: the file cannot be read, has other sections, or a section is not a mapping.
    """
    content = {} if file is None else read_document(file) or {}
    if not isinstance(content, dict):
        raise ConfigError(f"--job-options {file}: expected a mapping with sections of {', '.join(sections)}")
    for name, value in content.items():
        if name not in sections:
            raise ConfigError(f"--job-options {file}: no section {name!r} in this job: use {', '.join(sections)}")
        if not isinstance(value, dict):
            raise ConfigError(f"--job-options {file}: {name}: expected a mapping of fields, found {value!r}")
    return content


def merged(base: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with further fields: mappings are merged, and so are lists whose items have names.

    Other values, and other lists, replace what is there.
    """
    result = dict(base)
    for key, value in further.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = merged(old, value)
        elif isinstance(old, list) and _are_named(old) and _are_named(value):
            result[key] = _merged_items(old, value)
        else:
            result[key] = value
    return result


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) and "name" in item for item in value)


def _merged_items(old: list[Any], further: list[Any]) -> list[Any]:
    """Return the items of two lists; items with the same name (and mount path) are merged, and the second one's fields
    win."""

    def place(item: Mapping[str, Any]) -> tuple[Any, Any]:
        return item["name"], item.get("mountPath")

    items = {place(item): item for item in old}
    for item in further:
        items[place(item)] = merged(items.get(place(item), {}), item)
    return list(items.values())
