"""The index of a shard, from the offsets that are known while it is written.

Beside the shard goes energon's `.tar.idx`; what its `index.sqlite` needs waits in the folder's scratch until all shards
are there, so that no shard is read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.energon.flavors.webdataset.prepare import IndexSample, IndexSamplePart

from llava_mcore.data.storage.shard_files import OFFSET
from llava_mcore.files.atomic import move, write_synced


@dataclass(frozen=True, slots=True)
class PartOffset:
    """A member of a sample: its name, and where its contents are."""

    name: str
    start: int
    num_bytes: int


@dataclass(slots=True)
class ShardIndex:
    """The samples of a shard, with their first bytes, and the members of each."""

    keys: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    parts: list[list[PartOffset]] = field(default_factory=list)
    end: int = 0
    """Byte after the last sample."""

    def begin_sample(self, key: str, start: int) -> None:
        """Take a sample that starts at a byte of the shard."""
        self.keys.append(key)
        self.starts.append(start)
        self.parts.append([])

    def add_part(self, part: PartOffset, end: int) -> None:
        """Take a member of the sample that was begun; `end`: the byte after it and its padding."""
        self.parts[-1].append(part)
        self.end = end

    def write(self, temporary: Path, offsets: Path, rows: Path) -> None:
        """Write energon's offsets, and the rows of `index.sqlite` as JSON, each atomically.

        Args:
            temporary: path in the folder of `rows` that no other process uses.
        """
        for final, data in ((rows, self._rows()), (offsets, self._offsets())):
            write_synced(temporary, data)
            move(temporary, final)

    def _offsets(self) -> bytes:
        return b"".join(OFFSET.pack(offset) for offset in (*self.starts, self.end))

    def _rows(self) -> bytes:
        parts = [[(part.name, part.start, part.num_bytes) for part in sample] for sample in self.parts]
        rows = {"keys": self.keys, "starts": [*self.starts, self.end], "parts": parts}
        return json.dumps(rows, separators=(",", ":")).encode()


def rows_name(shard: str) -> str:
    """Return the name of the file of a shard's rows in the scratch folder."""
    return f"{shard}.rows.json"


def samples_of(path: Path, tar_file_id: int) -> Iterator[tuple[IndexSample, Sequence[IndexSamplePart]]]:
    """Yield the rows of `index.sqlite` for each sample of a shard, from the file that `ShardIndex.write` wrote.

    Args:
        tar_file_id: number of the shard among those of the dataset.
    """
    rows = json.loads(path.read_bytes())
    starts = rows["starts"]
    for index, (key, parts) in enumerate(zip(rows["keys"], rows["parts"], strict=True)):
        sample = IndexSample(
            tar_file_id=tar_file_id,
            sample_key=key,
            sample_index=index,
            byte_offset=starts[index],
            byte_size=starts[index + 1] - starts[index],
        )
        members = [
            IndexSamplePart(
                tar_file_id=tar_file_id,
                sample_index=index,
                part_name=name,
                content_byte_offset=start,
                content_byte_size=num_bytes,
            )
            for name, start, num_bytes in parts
        ]
        yield sample, members
