"""Finished shards -> an energon dataset: index, split and manifest, like those of `energon prepare`.

Energon's own command reads all shards again, keeps the rows of all indexes in a queue, and ends the process on an
error. Here the writers of shards note the rows (`shard_index`), and its functions write them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from megatron.energon import __version__ as energon_version
from megatron.energon.bracecollapse import collapse
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.config import INDEX_BATCH_SIZE, INDEX_SQLITE_FILENAME, INFO_JSON_FILENAME
from megatron.energon.flavors.webdataset.prepare import (
    IndexSample,
    IndexSamplePart,
    IndexShardInfo,
    SqliteIndexWriter,
)
from megatron.energon.flavors.webdataset.structs import WebdatasetInfo, WebdatasetSplits
from megatron.energon.typed_converter import to_json_object

from llava_mcore.compat.energon.shards import rows_of_shard
from llava_mcore.data.encode.record_keys import CHOSEN, REJECTED
from llava_mcore.data.encode.tokens import ORIGIN_FILE
from llava_mcore.data.storage.dataset_path import META, PAIRS_FILE, SCRATCH
from llava_mcore.errors import DataError, counted
from llava_mcore.files.atomic import move, sync, sync_tree
from llava_mcore.prepare.counts import ShardReport
from llava_mcore.prepare.output.shard_index import rows_name, samples_of
from llava_mcore.processes.forkserver import interrupts_afterwards

DATASET = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
LINT = {"sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"}, "field_map": {"text": "json"}}
"""Another view of the same samples, because `energon lint` (7.4) does not support crude datasets and fails on each
one."""
MAX_PARTS = 50
NAMESPACE = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")
"""Namespace of identifiers derived from hashes (RFC 4122's for object identifiers)."""


def write_meta(
    folder: Path,
    reports: Sequence[ShardReport],
    *,
    val_ratio: float,
    origin: Mapping[str, Any] | None = None,
    has_pairs: bool = False,
    on_shard: Callable[[], None] = lambda: None,
) -> None:
    """Index the shards and write .nv-meta atomically, after everything else is on the disk.

    `origin` describes the stored tokens (`stored_tokens.origin_of`); None if there are none. `has_pairs`: samples are
    preference pairs, which training does not take.

    Raises DataError if a shard differs from what was written, or there are too few for a validation split.
    """
    written = [report for report in reports if report.name is not None]
    splits = split_shards([str(report.name) for report in written], val_ratio)
    meta = folder / SCRATCH / "nv-meta"
    shutil.rmtree(meta, ignore_errors=True)
    meta.mkdir()
    _write_index(folder, written, meta / INDEX_SQLITE_FILENAME, on_shard)
    info = WebdatasetInfo(
        energon_version=energon_version, shard_counts={str(r.name): r.counts.entries for r in written}
    )
    (meta / INFO_JSON_FILENAME).write_text(json.dumps(to_json_object(info), indent=2), encoding="utf-8")
    # The same shards are the same dataset wherever they were written; the position of a loader refers to it.
    identity = uuid.uuid5(NAMESPACE, "".join(report.sha256 for report in written))
    (meta / "index.uuid").write_text(str(identity), encoding="utf-8")
    collapsed = {part: collapse(names, keep_order=True) for part, names in splits.items()}
    _write_yaml(meta / "split.yaml", to_json_object(WebdatasetSplits(split_parts=collapsed)))
    _write_yaml(meta / "lint.yaml", LINT)
    _write_yaml(meta / "dataset.yaml", DATASET)
    if origin is not None:
        (meta / ORIGIN_FILE).write_text(json.dumps(origin), encoding="utf-8")
    if has_pairs:
        (meta / PAIRS_FILE).write_text(f"Each sample has a {CHOSEN} and a {REJECTED} answer.\n", encoding="utf-8")
    shutil.rmtree(folder / META, ignore_errors=True)
    sync_tree(meta)
    move(meta, folder / META)
    for report in written:
        (folder / SCRATCH / rows_name(str(report.name))).unlink(missing_ok=True)


def split_shards(names: Sequence[str], val_ratio: float) -> dict[str, list[str]]:
    """Return the shards of each part; validation shards are chosen at random but always the same, and at least one if
    requested.

    Raises DataError if nothing would be left to train on.
    """
    num_val = max(1, round(len(names) * val_ratio)) if val_ratio else 0
    if num_val >= len(names):
        raise DataError(
            f"{counted(len(names), 'shard')} cannot be split by --val-ratio {val_ratio}; lower --samples-per-shard"
        )
    val = set(random.Random(0).sample(list(names), num_val))
    return {"train": [n for n in names if n not in val], "val": [n for n in names if n in val], "test": []}


def _write_index(folder: Path, written: Sequence[ShardReport], sqlite: Path, on_shard: Callable[[], None]) -> None:
    """Write index.sqlite from what the writers of the shards have noted."""
    indices = {str(report.name): index for index, report in enumerate(written)}
    with contextlib.closing(SqliteIndexWriter(EPath(sqlite))) as writer:
        for index, report in enumerate(written):
            name = str(report.name)
            noted = folder / SCRATCH / rows_name(name)
            if noted.is_file() and (folder / f"{name}.idx").is_file():
                samples, parts = zip(*samples_of(noted, index), strict=True)
                writer.append_samples(samples)
                writer.append_parts([part for members in parts for part in members])
            else:
                _read_index(folder, report, indices, writer)
            on_shard()


def _read_index(folder: Path, report: ShardReport, indices: Mapping[str, int], index: SqliteIndexWriter) -> None:
    """Read a shard through for its rows, and write the index beside it: an earlier version noted nothing, or an
    earlier run has used its notes."""
    rows = rows_of_shard(str(report.name), indices, EPath(folder), MAX_PARTS)
    with interrupts_afterwards():  # energon would log it and leave the shard's samples out
        for batch in itertools.batched(_checked(rows, folder, report), INDEX_BATCH_SIZE):
            index.append_samples([row for row in batch if isinstance(row, IndexSample)])
            index.append_parts([row for row in batch if isinstance(row, IndexSamplePart)])
    sync(folder / f"{report.name}.idx")


def _checked(rows: Iterable[Any], folder: Path, report: ShardReport) -> Iterator[Any]:
    """Yield the index rows of a shard. Energon only logs a shard that it cannot read; here it is a DataError."""
    num_entries = report.counts.entries
    for row in rows:
        if isinstance(row, IndexShardInfo) and row.shard_info.count != num_entries:
            num_entries = row.shard_info.count
        else:
            yield row
    if num_entries != report.counts.entries:
        raise DataError(
            f"{folder / str(report.name)} has {counted(num_entries, 'sample')}, but {report.counts.entries} "
            "were written; they have been changed: remove the shard and run the same command again"
        )


def _write_yaml(path: Path, content: Any) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
