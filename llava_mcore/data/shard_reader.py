"""Samples out of local shards, one read each.

Energon reads a sample by several calls through its storage client and Python's tarfile, which takes about as long as
resizing a picture. Here the bytes of a sample come in one piece and plain headers are read directly. Whatever is not
plain (long names, links, damage) is left to energon's own reader, so that samples and errors are the same.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import BinaryIO

from megatron.energon import SavableDataset
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.base import BaseWrapperDataset

from llava_mcore.data.shard_files import OFFSET

NAME, SIZE, CHECKSUM, KIND, PREFIX = slice(0, 100), slice(124, 136), slice(148, 156), 156, 345
"""Where the fields of a tar header (POSIX ustar) lie; prefix is only used by long names."""
PLAIN_KINDS = b"0\0"
"""Of regular files."""


def read_local_shards_directly(dataset: SavableDataset[object]) -> None:
    """Give the readers of local shards under energon's wrappers their faster form. Others stay as they are."""
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        dataset.join_readers = [
            PlainReader(r) if type(r) is ShardInfosITarReader and r.base_path.is_local() else r
            for r in dataset.join_readers
        ]
    elif isinstance(dataset, BaseWrapperDataset):
        for inner in dataset.datasets:
            read_local_shards_directly(inner)


class PlainReader(ShardInfosITarReader):
    """Energon's reader of indexed shards, with a short way for plain samples of local ones."""

    def __init__(self, reader: ShardInfosITarReader) -> None:
        """Take over what `reader` reads."""
        super().__init__(
            reader.base_path,
            reader.shard_infos,
            part_filter=reader.part_filter,
            sample_filter=reader.sample_filter,
            itar_cache_size=reader.itar_cache_size,
        )
        self._open_shards: OrderedDict[int, _Shard] = OrderedDict()

    def __getitem__(self, idx: int) -> FilteredSample | None:
        """Return a sample by its number; None if split.yaml excludes it. Raises as energon's reader does."""
        number = bisect_right(self.shard_count_cumsum, idx) - 1
        block = self._shard(number).read(idx - self.shard_count_cumsum[number])
        files = None if block is None else plain_files(block)
        sample = None if files is None else self._sample(idx, self.shard_infos[number].name, files)
        return super().__getitem__(idx) if sample is None else sample

    def close(self) -> None:
        """Close all files."""
        super().close()
        for shard in self._open_shards.values():
            shard.close()
        self._open_shards.clear()

    def _shard(self, number: int) -> _Shard:
        shard = self._open_shards.get(number)
        if shard is None:
            if len(self._open_shards) == self.itar_cache_size:
                self._open_shards.popitem(last=False)[1].close()
            shard = self._open_shards[number] = _Shard(self.shard_infos[number].path.local_path())
        self._open_shards.move_to_end(number)
        return shard

    def _sample(self, idx: int, shard_name: str, files: list[tuple[str, bytes]]) -> FilteredSample | None:
        """Put a sample together. None if energon has to judge: an excluded one, or files of several samples."""
        parts: dict[str, bytes] = {}
        keys, names = set(), []
        for name, data in files:
            found = split_name_re.match(name)
            if found is None or skip_meta_re.match(name):
                continue
            key, part = found.groups()
            keys.add(key)
            if self.part_filter is None or self.part_filter(part):
                parts[part] = data
                names.append(name)
        if len(keys) != 1 or (self.sample_filter is not None and not self.sample_filter(f"{shard_name}/{key}")):
            return None
        source = SourceInfo(dataset_path=self.base_path, index=idx, shard_name=shard_name, file_names=tuple(names))
        about = {
            "__key__": key,
            "__shard__": shard_name,
            "__restore_key__": ("Webdataset", idx),
            "__sources__": (source,),
        }
        return FilteredSample(**about, **parts)


class _Shard:
    """An open shard and its index."""

    def __init__(self, path: Path) -> None:
        with ExitStack() as stack:
            self._tar: BinaryIO = stack.enter_context(path.open("rb", buffering=0))
            self._index: BinaryIO = stack.enter_context(path.with_suffix(".tar.idx").open("rb", buffering=0))
            self.close = stack.pop_all().close

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a sample, None if they are not all there."""
        ends = os.pread(self._index.fileno(), 2 * OFFSET.size, number * OFFSET.size)
        if len(ends) != 2 * OFFSET.size:
            return None
        start, end = OFFSET.unpack_from(ends, 0)[0], OFFSET.unpack_from(ends, OFFSET.size)[0]
        block = os.pread(self._tar.fileno(), end - start, start)
        return block if len(block) == end - start else None


def plain_files(block: bytes) -> list[tuple[str, bytes]] | None:
    """Return names and contents of a piece of a tar file, None if it holds anything but regular files."""
    files, place = [], 0
    while place < len(block):
        header = block[place : place + BLOCKSIZE]
        start = place + BLOCKSIZE
        try:
            size = int(header[SIZE].strip(b"\0 "), 8)
            checksum = int(header[CHECKSUM].strip(b"\0 "), 8)
            name = header[NAME].rstrip(b"\0").decode("utf-8")
        except ValueError:
            return None
        # The checksum counts its own field as eight blanks.
        if sum(header) - sum(header[CHECKSUM]) + 8 * ord(" ") != checksum or len(block) < start + size:
            return None
        if header[KIND] not in PLAIN_KINDS or header[PREFIX] or "\0" in name or name.endswith("/"):
            return None
        files.append((name, block[start : start + size]))
        place = start + -(-size // BLOCKSIZE) * BLOCKSIZE
    return files
