"""Samples of several files in tar files, or samples that this importer has written."""

from __future__ import annotations

import contextlib
import hashlib
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.storage.tar_files import LINKS, Link, NoContents, TarIndex, members, open_tar
from llava_mcore.errors import DataError
from llava_mcore.files.regular import open_regular_file
from llava_mcore.prepare.row_types import BadSample, Reason, RowRange, SourceRow
from llava_mcore.prepare.sources.base import Cuts, Scan
from llava_mcore.prepare.sources.parts import is_hidden, is_used, media_in_order, not_read, row_of


@dataclass(frozen=True, slots=True)
class TarShard:
    """A tar file with such samples, or with samples that this importer has written."""

    path: Path
    name: str
    folder: Path
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """Read the headers of all members, which determine the fingerprint. DataError if the file is truncated, or
        parts of a sample are not adjacent."""
        sha, segments = hashlib.sha256(), []
        count = first = start = 0
        cut, last, groups = cuts.next_cut(0), "", _SampleGroups()
        with self._open() as tar:
            for member in self._members(tar):
                sha.update(
                    f"{member.name}\0{member.size}\0{member.mtime}\0{member.chksum}\n".encode(
                        "utf-8", "surrogateescape"
                    )
                )
                stem, part = split_member(member.name)
                groups.add(stem, part)
                if stem != last:
                    if count == cut:
                        segments.append(cuts.segment(first, cut - first, start, member.offset))
                        first, start, cut = cut, member.offset, cuts.next_cut(cut)
                    count, last = count + 1, stem
            end = tar.offset
        if count > first:
            segments.append(cuts.segment(first, count - first, start, end))
        return Scan(tuple(segments), count, sha.hexdigest(), groups.check(self.path))

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield the samples starting at a segment's first byte."""
        tar_index = TarIndex(lambda: open_regular_file(self.path))
        with self._open(segment.start) as tar:
            index, last, parts = segment.index - 1, "", dict[str, bytes | NoContents]()
            for member in self._members(tar):
                stem, part = split_member(member.name)
                if stem != last:
                    if last:
                        yield SourceRow(index, _tar_sample(last, parts))
                    index, last, parts = index + 1, stem, {}
                    if index == segment.index + segment.count:
                        return
                parts[part] = self._content(tar, member, tar_index)
            if last:
                yield SourceRow(index, _tar_sample(last, parts))

    @contextlib.contextmanager
    def _open(self, start: int = 0) -> Iterator[tarfile.TarFile]:
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(self.path.open("rb"))
                file.seek(start)
                tar = stack.enter_context(open_tar(file))
            except (OSError, ValueError, tarfile.TarError) as error:
                raise DataError(f"{self.path} is not a readable tar file: {error}") from error
            yield tar

    def _members(self, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        """Yield the parts of samples, including links."""
        try:
            for member in members(tar):
                if (member.isreg() or member.type in LINKS) and split_member(member.name)[1]:
                    yield member
        except (OSError, ValueError, tarfile.TarError) as error:
            raise DataError(f"{self.path} is broken near byte {tar.offset}: {error}") from error

    def _content(self, tar: tarfile.TarFile, member: tarfile.TarInfo, tar_index: TarIndex) -> bytes | NoContents:
        """Return a member's contents; those of an earlier one for a hard link."""
        if member.type in LINKS:
            return tar_index.contents(Link(member.type, member.linkname, member.offset), self.most_bytes)
        if member.size > self.most_bytes:
            return NoContents(f"it has {member.size} bytes; the limit is {self.most_bytes}")
        file = tar.extractfile(member)
        assert file is not None
        data = file.read()
        if len(data) != member.size:
            raise DataError(f"{self.path} is truncated within {member.name}")
        return data


class _SampleGroups:
    """The parts of each sample of a tar. A sample's parts must be adjacent, since a reader passes through once."""

    def __init__(self) -> None:
        self._parts: dict[str, frozenset[str]] = {}
        self._current: set[str] = set()
        self._stem = ""
        self._scattered: dict[str, None] = {}
        self._unused: Counter[str] = Counter()

    def add(self, stem: str, part: str) -> None:
        """Take the next member."""
        if stem != self._stem:
            self._close()
            self._stem, self._current = stem, set()
        self._current.add(part)
        if not is_used(part):
            self._unused[f".{part}"] += 1

    def _close(self) -> None:
        """End a sample. One that is repeated as a whole is two samples of one name."""
        parts = frozenset(self._current)
        if self._parts.setdefault(self._stem, parts) != parts:
            self._scattered[self._stem] = None

    def check(self, path: Path) -> tuple[str, ...]:
        """Return notes about parts that nothing reads. DataError if parts of a sample are not adjacent."""
        self._close()
        if self._scattered:
            first, count = next(iter(self._scattered)), len(self._scattered)
            others = f" (and of {count - 1:,} more samples)" if count > 1 else ""
            raise DataError(f"{path}: parts of {first}{others} are not adjacent; write the tar with --sort=name")
        return (not_read("parts are not read", self._unused),) if self._unused else ()


def split_member(name: str) -> tuple[str, str]:
    """Return a member's sample and part, which starts at the first dot of the file name, as WebDataset divides it.

    The part is '' if the member belongs to no sample.
    """
    folder, slash, file = name.rpartition("/")
    stem, _, part = file.partition(".")
    return folder + slash + stem, "" if is_hidden(name) else part


def _tar_sample(stem: str, contents: Mapping[str, bytes | NoContents]) -> dict[str, Any] | BadSample:
    parts = {part: data for part, data in contents.items() if isinstance(data, bytes)}
    empty = [
        f"{stem}.{part}: {data.reason}"
        for part, data in contents.items()
        if isinstance(data, NoContents) and is_used(part)
    ]
    if empty:
        return BadSample(Reason.IMAGE_MISSING, "; ".join(empty))
    return row_of(stem, parts, {name: parts[name] for name in media_in_order(parts)})
