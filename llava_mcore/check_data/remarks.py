"""Compares a prepared folder's metadata (shards, splits, index) with its files."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta

from llava_mcore.data.storage.blend import SPLIT
from llava_mcore.data.storage.dataset_path import META
from llava_mcore.data.storage.shard_files import META_ERRORS, ends_properly, known_shards
from llava_mcore.errors import DataError

OTHER_PARTS = ("val", "test")


def remarks_on(leaf: Path) -> list[str]:
    """Return remarks about a prepared folder that do not prevent training. No sample is read."""
    try:
        shards = known_shards(leaf)
        parts = {part: _names(leaf, part) for part in (SPLIT, *OTHER_PARTS)}
    except (*META_ERRORS, DataError):
        return []  # reported by check_shards
    return [
        *_unknown_files(leaf, shards),
        *_split_remarks(leaf, shards, parts),
        *_cut(leaf, shards),
        *_sqlite(leaf, shards),
    ]


def _names(leaf: Path, part: str) -> list[str]:
    """Return the shards of a part of split.yaml; empty if there are none."""
    try:
        return WebdatasetMeta.from_config(EPath(leaf), split_part=part).split_part_files
    except META_ERRORS:
        return []


def _unknown_files(leaf: Path, shards: dict[str, int]) -> list[str]:
    files = {str(file.relative_to(leaf)) for file in leaf.rglob("*.tar")}
    unknown = sorted(files - shards.keys())
    if not unknown:
        return []
    return [f"{leaf}: {_some(unknown)} not in the index, so never trained on; prepare the dataset again to add them"]


def _split_remarks(leaf: Path, shards: dict[str, int], parts: dict[str, list[str]]) -> list[str]:
    remarks = []
    file = leaf / META / "split.yaml"
    twice = sorted(name for name, count in Counter(parts[SPLIT]).items() if count > 1)
    if twice:
        remarks.append(
            f"{file}: {_some(twice)} listed more than once in {SPLIT!r}; their samples are repeated as often"
        )
    for part in OTHER_PARTS:
        both = sorted(set(parts[SPLIT]) & set(parts[part]))
        if both:
            remarks.append(
                f"{file}: {_some(both)} in both {SPLIT!r} and {part!r}; it would be evaluated on trained data"
            )
    left = sorted(shards.keys() - {name for names in parts.values() for name in names})
    if left:
        remarks.append(f"{file}: {_some(left)} in none of the parts {SPLIT}, {', '.join(OTHER_PARTS)}")
    return remarks


def _cut(leaf: Path, shards: dict[str, int]) -> list[str]:
    """Return a remark about shards that were truncated between two files before they were indexed: later samples are
    lost."""
    cut = [name for name in shards if _exists(leaf / name) and not ends_properly(leaf / name)]
    return [f"{leaf}: {_some(cut)} without an end mark, so they were truncated before the preparation"] if cut else []


def _exists(shard: Path) -> bool:
    return shard.is_file() and shard.with_suffix(".tar.idx").is_file()


def _sqlite(leaf: Path, shards: dict[str, int]) -> list[str]:
    """Compare index.sqlite, which finds samples by key, with the counts of .info.json."""
    file = leaf / META / "index.sqlite"
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)) as db:
            # An index makes these look-ups fast for any number of samples.
            query = "SELECT MAX(sample_index) FROM samples WHERE tar_file_id = ?"
            lasts = [db.execute(query, (shard,)).fetchone()[0] for shard in range(len(shards))]
    except sqlite3.Error as error:
        return [f"{file} cannot be read ({error}): samples cannot be looked up by key; prepare the dataset again"]
    counts = [0 if last is None else last + 1 for last in lasts]
    wrong = [
        f"{name} ({count} samples, not {expected})"
        for (name, expected), count in zip(shards.items(), counts, strict=True)
        if count != expected
    ]
    return [f"{file} does not belong to these shards: {_some(wrong)}; prepare the dataset again"] if wrong else []


def _some(names: list[str], max_names: int = 3) -> str:
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more
