"""The rows that megatron-energon 7.4.1 writes into the index of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from llava_mcore.compat.required import required


def rows_of_shard(name: str, shard_indices: Mapping[str, int], folder: EPath, most_parts: int) -> Iterable[Any]:
    """Yield the rows of a shard's samples and their parts, and write the index beside the shard.

    Args:
        name: of the shard in `folder`.
        shard_indices: of all shards, by name.
        most_parts: parts of a sample that are looked at.
    """
    rows: Iterable[Any] = required(WebdatasetPreparator, "_preprocess_tar")(name, shard_indices, folder, most_parts)
    return rows
