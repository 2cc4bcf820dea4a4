"""Shards in megatron-energon 7.4.1: the members that it reads, and the rows that it writes into the index of a dataset.

Energon keeps shards open, and Python's tarfile keeps a record of every member that it has read. So a loader process
grows by about 0.8 KB per sample, 8 GB in ten million. Energon never uses the records. It also reads forever if a header
has a negative size, because tarfile then seeks backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from tarfile import TarInfo
from typing import Any

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar import ITarFile
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from llava_mcore.compat.required import replace_name, required

_read_next = required(ITarFile, "next")


def _read_next_and_forget(self: ITarFile) -> TarInfo | None:
    before = self.offset
    try:
        member = _read_next(self)
    except RecursionError as error:
        raise ValueError("too many headers for one member of the tar file") from error
    self.members.clear()
    if member is not None and (member.size < 0 or self.offset <= before):
        raise ValueError(f"the member {member.name!r} of the tar file has {member.size} bytes")
    return member


def forget_read_members() -> None:
    """Make open shards forget the members that have been read. A second call changes nothing.

    Raises:
        AttributeError: this version of energon reads shards differently.
    """
    replace_name(ITarFile, "next", _read_next_and_forget)


def rows_of_shard(name: str, shard_indices: Mapping[str, int], folder: EPath, most_parts: int) -> Iterable[Any]:
    """Yield the rows of a shard's samples and their parts, and write the index beside the shard.

    Args:
        name: of the shard in `folder`.
        shard_indices: of all shards, by name.
        most_parts: parts of a sample that are looked at.
    """
    rows: Iterable[Any] = required(WebdatasetPreparator, "_preprocess_tar")(name, shard_indices, folder, most_parts)
    return rows
