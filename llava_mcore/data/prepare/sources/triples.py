"""Samples of several files: NNN.jpg, NNN.txt (answer) and NNN.json (question), in a folder or in tar files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.encoding.sample_media import (
    AUDIOS_KEY,
    FPS_KEY,
    FRAMES_KEY,
    VIDEOS_KEY,
    is_sound_part,
    listed_videos,
)
from llava_mcore.data.prepare.row_types import BadSample, Reason, Row, Segment
from llava_mcore.data.prepare.sources.base import Cuts, Scan
from llava_mcore.data.prepare.sources.lines import decode_row
from llava_mcore.data.samples import AUDIO_PARTS, IMAGE_PARTS
from llava_mcore.data.storage.tar_members import LINKS, Link, NoContents, TarIndex, members, open_tar
from llava_mcore.errors import DataError
from llava_mcore.files.regular import RefusedFileError, open_regular_file, read_regular_file

TEXT_PARTS = ("json", "txt")


@dataclass(frozen=True, slots=True)
class TripleFolder:
    """A folder of files. Only their names are kept in memory as a whole."""

    path: Path
    name: str
    folder: Path
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """List the folder; its fingerprint depends on names, sizes and times."""
        sha = hashlib.sha256()
        _listing.cache_clear()
        num_rows = 0
        for stem, parts in _listing(self.path):
            num_rows += 1
            for part in parts:
                try:
                    stat = (self.path / f"{stem}.{part}").stat()
                    size, time = stat.st_size, stat.st_mtime_ns
                except OSError:  # a broken link, for which its row is skipped
                    size = time = -1
                sha.update(f"{stem}.{part}\0{size}\0{time}\n".encode("utf-8", "surrogateescape"))
        return Scan(cuts.by_number(num_rows), num_rows, sha.hexdigest())

    def read(self, segment: Segment) -> Iterator[Row]:
        """Yield the samples in the order of their names. DataError if a file has been deleted."""
        samples = _listing(self.path)[segment.index : segment.index + segment.count]
        for index, (stem, parts) in enumerate(samples, start=segment.index):
            # Absolute: a relative one would be looked for in --image-dir.
            paths = {part: self.path.absolute() / f"{stem}.{part}" for part in parts}
            try:
                texts = {
                    p.lower(): read_regular_file(paths[p], self.most_bytes) for p in parts if p.lower() in TEXT_PARTS
                }
            except RefusedFileError as error:
                yield Row(index, BadSample(Reason.NO_CONVERSATION, str(error)))
                continue
            except OSError as error:
                if not Path(str(error.filename)).is_symlink():
                    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
                yield Row(index, BadSample(Reason.NO_CONVERSATION, f"{error.filename}: {error.strerror}"))
                continue
            yield Row(index, _sample(stem, texts, {p: str(paths[p]) for p in parts if p.lower() not in TEXT_PARTS}))


@functools.lru_cache(maxsize=1)
def _listing(folder: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return the samples of a folder with their parts, in order. Cached, because every shard needs it."""
    found: dict[str, list[str]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_part(entry.name):
                stem, _, part = entry.name.partition(".")
                found.setdefault(stem, []).append(part)
    return [(stem, tuple(sorted(found[stem]))) for stem in sorted(found)]


@dataclass(frozen=True, slots=True)
class TarShard:
    """A tar file with such samples, or with samples that this importer has written."""

    path: Path
    name: str
    folder: Path
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """Read the headers of all members, which determine the fingerprint. DataError if the file is truncated."""
        sha, segments = hashlib.sha256(), []
        number = first = start = 0
        cut, last = cuts.next_cut(0), ""
        with self._open() as tar:
            for member in self._members(tar):
                sha.update(
                    f"{member.name}\0{member.size}\0{member.mtime}\0{member.chksum}\n".encode(
                        "utf-8", "surrogateescape"
                    )
                )
                stem = _split(member.name)[0]
                if stem != last:
                    if number == cut:
                        segments.append(cuts.segment(first, cut - first, start, member.offset))
                        first, start, cut = cut, member.offset, cuts.next_cut(cut)
                    number, last = number + 1, stem
            end = tar.offset
        if number > first:
            segments.append(cuts.segment(first, number - first, start, end))
        return Scan(tuple(segments), number, sha.hexdigest())

    def read(self, segment: Segment) -> Iterator[Row]:
        """Yield the samples starting at a segment's first byte."""
        tar_index = TarIndex(lambda: open_regular_file(self.path))
        with self._open(segment.start) as tar:
            index, last, parts = segment.index - 1, "", dict[str, bytes | NoContents]()
            for member in self._members(tar):
                stem, part = _split(member.name)
                if stem != last:
                    if last:
                        yield Row(index, _tar_sample(last, parts))
                    index, last, parts = index + 1, stem, {}
                    if index == segment.index + segment.count:
                        return
                parts[part] = self._content(tar, member, tar_index)
            if last:
                yield Row(index, _tar_sample(last, parts))

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
                if (member.isreg() or member.type in LINKS) and _split(member.name)[1]:
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


def is_part(name: str) -> bool:
    """Return whether a file name is that of a sample's part."""
    return name.partition(".")[2].lower() in (*TEXT_PARTS, *IMAGE_PARTS, *AUDIO_PARTS) and not name.startswith(".")


def _split(name: str) -> tuple[str, str]:
    """Return a member's sample and part, which starts at the first dot of the file name."""
    folder, slash, file = name.rpartition("/")
    stem, _, part = file.partition(".")
    return folder + slash + stem, part


def _tar_sample(stem: str, found: Mapping[str, bytes | NoContents]) -> dict[str, Any] | BadSample:
    parts = {part: data for part, data in found.items() if isinstance(data, bytes)}
    empty = [
        f"{stem}.{part}: {data.reason}"
        for part, data in found.items()
        if isinstance(data, NoContents) and _is_used(part)
    ]
    if empty:
        return BadSample(Reason.IMAGE_MISSING, "; ".join(empty))
    names = [part for part in parts if part.rpartition(".")[2].lower() in (*IMAGE_PARTS, *AUDIO_PARTS)]
    names.sort(key=lambda part: (int(n) if (n := part.partition(".")[0]).isdecimal() else 0, part))
    return _sample(stem, parts, {name: parts[name] for name in names})


def _is_used(part: str) -> bool:
    return part.rpartition(".")[2].lower() in (*TEXT_PARTS, *IMAGE_PARTS, *AUDIO_PARTS)


def _sample(stem: str, texts: Mapping[str, bytes], media: Mapping[str, Any]) -> dict[str, Any] | BadSample:
    """Return a row with question, answer, pictures, videos and sounds; messages are unchanged.

    media: bytes or path of each picture and sound part, by its name; frames are the parts that "videos" lists.
    """
    if "json" not in texts:
        return BadSample(Reason.NO_CONVERSATION, f"{stem} has no .json")
    row = decode_row(texts["json"])
    if isinstance(row, BadSample):
        return row
    try:
        listed = listed_videos(row.get(VIDEOS_KEY))
    except DataError as error:
        return BadSample(Reason.WRONG_TYPE, str(error))
    if not media and not listed and "messages" not in row:
        return BadSample(Reason.IMAGE_MISSING, f"{stem} has no picture or sound beside its .json")
    frames = {name for video in listed for name in video.frames}
    sounds = {name: item for name, item in media.items() if is_sound_part(name)}
    pictures = [picture for name, picture in media.items() if name not in frames and name not in sounds]
    found: dict[str, Any] = {"id": stem, "image": pictures} if "messages" not in row else {"images": pictures}
    if listed:  # what is no part is a path
        found[VIDEOS_KEY] = [
            {FRAMES_KEY: [media.get(name, name) for name in video.frames], FPS_KEY: video.fps} for video in listed
        ]
    order = row.get(AUDIOS_KEY)
    if sounds:  # in the order of the json, or of their numbers
        found[AUDIOS_KEY] = [media.get(name, name) for name in (order if isinstance(order, list) else sounds)]
    if "txt" in texts:
        try:
            found["answer"] = texts["txt"].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return BadSample(Reason.NOT_UTF8, f"{stem}.txt: {error.reason} at byte {error.start}")
    return {"id": stem} | row | found
