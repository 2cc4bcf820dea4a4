"""JSON lines: every line is a row; blank ones are skipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.prepare.row_types import BadSample, Reason, RowRange, SourceRow, type_and_value
from llava_mcore.prepare.sources.base import BLOCK, Cuts, Scan
from llava_mcore.prepare.sources.remote_file import RemoteFile

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonLinesSource:
    """A .jsonl file."""

    path: Path | RemoteFile
    name: str
    folder: Path
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """Find the bytes at which shards start."""
        sha, segments = hashlib.sha256(), []
        start = first = num_lines = position = 0  # of the open segment; of the block
        cut, last = cuts.next_cut(0), b"\n"
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                sha.update(block)
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                while num_lines + len(ends) >= cut:
                    taken = cut - num_lines
                    stop = position + int(ends[taken - 1]) + 1
                    segments.append(cuts.segment(first, cut - first, start, stop))
                    ends, num_lines, first, start = ends[taken:], cut, cut, stop
                    cut = cuts.next_cut(cut)
                num_lines += len(ends)
                position += len(block)
                last = block[-1:]
        num_lines += last != b"\n"
        if num_lines > first:
            segments.append(cuts.segment(first, num_lines - first, start, position))
        return Scan(tuple(segments), num_lines, sha.hexdigest())

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield one row per line."""
        with self.path.open("rb") as file:
            file.seek(segment.start)
            for index in range(segment.index, segment.index + segment.count):
                line = file.readline(self.most_bytes + 1)
                if len(line) > self.most_bytes:
                    while not line.endswith(b"\n") and (following := file.readline(BLOCK)):
                        line = following
                    yield SourceRow(index, too_large("a line", self.most_bytes))
                elif line.strip():
                    yield SourceRow(index, decode_row(line))


def too_large(subject: str, most_bytes: int) -> BadSample:
    """Return the reason for skipping a row with too many bytes."""
    return BadSample(Reason.TOO_LARGE, f"{subject} of more than {most_bytes} bytes (--max-sample-bytes)")


def decode_row(data: bytes) -> dict[str, Any] | BadSample:
    """Return one JSON object, or why it is not one."""
    try:
        row = json.loads(data.removeprefix(BOM).decode("utf-8"), strict=False)
    except UnicodeDecodeError as error:
        return BadSample(Reason.NOT_UTF8, f"{error.reason} at byte {error.start} of the row")
    except (ValueError, RecursionError) as error:
        return BadSample(Reason.NOT_JSON, str(error))
    return row if isinstance(row, dict) else BadSample(Reason.NOT_JSON, f"found {type_and_value(row)}")
