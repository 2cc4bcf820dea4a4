"""Reads samples from shards with one read each.

Energon reads a sample by several calls through its storage client and Python's tarfile, which takes about as long as
resizing an image, and silently skips links. Here the bytes of a sample are read at once and plain headers are
parsed directly. Anything unusual is left to energon's own reader, so that the errors are the same.
"""

from __future__ import annotations

import tarfile
from bisect import bisect_right
from tarfile import BLOCKSIZE
from typing import Any

from megatron.energon import SavableDataset
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.base import BaseWrapperDataset

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.samples import AUDIO_PARTS, IMAGE_PARTS, TEXT_PARTS
from llava_mcore.data.storage.stored_tokens import StoredTokens
from llava_mcore.data.storage.tar_files import LINKS, OPEN_SHARDS, Link, NoContents, OpenShard, read_block

NAME, SIZE, CHECKSUM, KIND, PREFIX = slice(0, 100), slice(124, 136), slice(148, 156), 156, 345
"""Offsets of the fields of a tar header (POSIX ustar); prefix is only used by long names."""
PLAIN_KINDS = b"0\0"
"""Types of regular files."""
LINK_KINDS = b"".join(LINKS)
File = tuple[str, bytes | Link | NoContents]


def read_shards_directly(dataset: SavableDataset[Any], most_bytes: int) -> None:
    """Replace the readers of shards inside energon's wrappers with the faster one. Other readers stay as they are.

    most_bytes: maximum size of a sample; a larger one is not read.
    """
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        dataset.join_readers = [
            ShardReader(r, most_bytes) if type(r) is ShardInfosITarReader else r for r in dataset.join_readers
        ]
    elif isinstance(dataset, BaseWrapperDataset):
        for inner in dataset.datasets:
            read_shards_directly(inner, most_bytes)


class ShardReader(ShardInfosITarReader):
    """Energon's reader of indexed shards, with a fast path for normal samples."""

    def __init__(self, reader: ShardInfosITarReader, most_bytes: int = LIMITS.sample_bytes) -> None:
        """Take over the shards of `reader`."""
        super().__init__(
            reader.base_path,
            reader.shard_infos,
            part_filter=reader.part_filter,
            sample_filter=reader.sample_filter,
            itar_cache_size=reader.itar_cache_size,
        )
        self._most_bytes = most_bytes
        self._used: set[EPath] = set()

    def __getitem__(self, idx: int) -> FilteredSample | None:
        """Return a sample by its number; None if split.yaml excludes it. Raises the errors of energon's reader.

        A part without contents, such as a symbolic link, is returned as `NoContents`.
        """
        index = bisect_right(self.shard_count_cumsum, idx) - 1
        if not 0 <= index < len(self.shard_infos):
            return super().__getitem__(idx)
        info = self.shard_infos[index]
        self._used.add(info.path)
        shard = OPEN_SHARDS.get(info.path)
        files = self._files(shard, idx - self.shard_count_cumsum[index])
        sample = None if files is None else self._parts(shard, files)
        if sample is None:
            return super().__getitem__(idx)
        key, parts, names = sample
        if self.sample_filter is not None and not self.sample_filter(f"{info.name}/{key}"):
            return None
        source = SourceInfo(dataset_path=self.base_path, index=idx, shard_name=info.name, file_names=tuple(names))
        about = {
            "__key__": key,
            "__shard__": info.name,
            "__restore_key__": ("Webdataset", idx),
            "__sources__": (source,),
        }
        return FilteredSample(**about, **parts)

    def stored(self, idx: int, fingerprint: str) -> StoredTokens | None:
        """Return the tokens that are stored beside the shard of a sample that was read."""
        index = bisect_right(self.shard_count_cumsum, idx) - 1
        return OPEN_SHARDS.get(self.shard_infos[index].path).stored(idx - self.shard_count_cumsum[index], fingerprint)

    def close(self) -> None:
        """Close all files."""
        super().close()
        for path in self._used:
            OPEN_SHARDS.close(path)
        self._used.clear()

    def _files(self, shard: OpenShard, index: int) -> list[File] | None:
        """Return the members of a sample. None if energon's own reader has to be used."""
        ends = shard.ends(index)
        if ends is None:
            return None
        start, end = ends
        if end - start > self._most_bytes:
            return self._too_large(shard, start, end)
        block = shard.read(start, end)
        if block is None:
            return None
        files: list[File] | None = plain_files(block)  # type: ignore[assignment]
        try:
            if files is None:
                files = read_block(block, start, self._most_bytes)
            files = [*self._links_before(shard, index, start), *files]
        except (ValueError, tarfile.TarError):
            return None
        return files

    def _links_before(self, shard: OpenShard, index: int, start: int) -> list[File]:
        """Return links before a sample. In the index, a sample starts at its first regular file."""
        before = shard.ends(index - 1)
        begin = 0 if before is None else before[0]
        if start - begin < BLOCKSIZE or start - begin > self._most_bytes:
            return []
        header = shard.read(start - BLOCKSIZE, start)
        if header is None or header[KIND] not in LINK_KINDS or not _is_header(header):
            return []
        block = shard.read(begin, start) or b""
        files = read_block(block, begin, self._most_bytes)
        while files and not isinstance(files[0][1], Link):
            files = files[1:]
        return [(name, file) for name, file in files if isinstance(file, Link)]

    def _too_large(self, shard: OpenShard, start: int, end: int) -> list[File] | None:
        """Return the first member's name, so that the sample is skipped under its own key."""
        header = shard.read(start, start + BLOCKSIZE)
        if header is None or not _is_header(header) or header[KIND] not in PLAIN_KINDS or header[PREFIX]:
            return None
        name = header[NAME].rstrip(b"\0").decode("utf-8", "replace")
        return [(name, NoContents(f"the sample has {end - start} bytes; the limit is {self._most_bytes}"))]

    def _parts(self, shard: OpenShard, files: list[File]) -> tuple[str, dict[str, Any], list[str]] | None:
        """Return key, parts and file names of a sample. None if energon's own reader has to be used: files of several
        samples."""
        named = [(*stem_and_part, name, data) for name, data in files if (stem_and_part := _split(name)) is not None]
        # Links of the next sample come after this one, so they do not determine the key.
        keys = {key for key, _, _, data in named if not isinstance(data, Link)}
        if len(keys) != 1:
            return None
        parts: dict[str, Any] = {}
        names = []
        for key, part, name, data in named:
            if key not in keys:
                continue
            if isinstance(data, Link):
                data = shard.tar_index.contents(data, self._most_bytes)
            if _is_needed(part) if isinstance(data, NoContents) else self.part_filter is None or self.part_filter(part):
                parts[part] = data
                names.append(name)
        return keys.pop(), parts, names


def _split(name: str) -> tuple[str, str] | None:
    """Return key and part of a member's name; None if it does not belong to a sample."""
    match = split_name_re.match(name)
    return None if match is None or skip_meta_re.match(name) else (match[1], match[2])


def _is_needed(part: str) -> bool:
    return part.rsplit(".", 1)[-1].lower() in (*IMAGE_PARTS, *AUDIO_PARTS, *TEXT_PARTS)


def _is_header(header: bytes) -> bool:
    """Return whether a block is a header, by its checksum."""
    try:
        checksum = int(header[CHECKSUM].strip(b"\0 "), 8)
    except ValueError:
        return False
    # The checksum counts its own field as eight blanks.
    return sum(header) - sum(header[CHECKSUM]) + 8 * ord(" ") == checksum


def plain_files(block: bytes) -> list[tuple[str, bytes]] | None:
    """Return names and contents of a part of a tar file; None if it has anything but regular files."""
    files, offset = [], 0
    while offset < len(block):
        header = block[offset : offset + BLOCKSIZE]
        start = offset + BLOCKSIZE
        try:
            size = int(header[SIZE].strip(b"\0 "), 8)
            name = header[NAME].rstrip(b"\0").decode("utf-8")
        except ValueError:
            return None
        if size < 0 or not _is_header(header) or len(block) < start + size:
            return None
        if header[KIND] not in PLAIN_KINDS or header[PREFIX] or "\0" in name or name.endswith("/"):
            return None
        files.append((name, block[start : start + size]))
        offset = start + -(-size // BLOCKSIZE) * BLOCKSIZE
    return files
