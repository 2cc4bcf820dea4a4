"""Samples of several files in a folder: NNN.jpg, NNN.txt (answer) and NNN.json (question)."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.errors import DataError
from llava_mcore.files.regular import RefusedFileError, read_regular_file
from llava_mcore.prepare.row_types import BadSample, Reason, RowRange, SourceRow
from llava_mcore.prepare.sources.base import Cuts, Scan
from llava_mcore.prepare.sources.parts import TEXT_PARTS, is_hidden, is_used, media_in_order, not_read, row_of


@dataclass(frozen=True, slots=True)
class TripleFolder:
    """A folder of files, and its subfolders. Only their names are kept in memory as a whole."""

    path: Path
    name: str
    folder: Path
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """List the folder; its fingerprint depends on names, sizes and times."""
        sha = hashlib.sha256()
        _listing.cache_clear()
        samples, unused = _listing(self.path)
        for stem, parts in samples:
            for part in parts:
                try:
                    stat = (self.path / f"{stem}.{part}").stat()
                    size, time = stat.st_size, stat.st_mtime_ns
                except OSError:  # a broken link, for which its row is skipped
                    size = time = -1
                sha.update(f"{stem}.{part}\0{size}\0{time}\n".encode("utf-8", "surrogateescape"))
        notes = (not_read("files belong to no sample", Counter(unused)),) if unused else ()
        return Scan(cuts.by_number(len(samples)), len(samples), sha.hexdigest(), notes)

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield the samples in the order of their names. DataError if a file has been deleted."""
        samples = _listing(self.path)[0][segment.index : segment.index + segment.count]
        for index, (stem, parts) in enumerate(samples, start=segment.index):
            # Absolute: a relative one would be looked for in --image-dir.
            paths = {part: self.path.absolute() / f"{stem}.{part}" for part in parts}
            try:
                texts = {
                    p.lower(): read_regular_file(paths[p], self.most_bytes) for p in parts if p.lower() in TEXT_PARTS
                }
            except RefusedFileError as error:
                yield SourceRow(index, BadSample(Reason.NO_CONVERSATION, str(error)))
                continue
            except OSError as error:
                if not Path(str(error.filename)).is_symlink():
                    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
                yield SourceRow(index, BadSample(Reason.NO_CONVERSATION, f"{error.filename}: {error.strerror}"))
                continue
            yield SourceRow(index, row_of(stem, texts, {part: str(paths[part]) for part in media_in_order(parts)}))


@functools.lru_cache(maxsize=1)
def _listing(folder: Path) -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    """Return the samples of a folder with their parts, in order, and the files that belong to none.

    Cached, because every shard needs it. In subfolders, which may hold anything, only files beside a .json are samples.
    """
    samples: dict[str, list[str]] = {}
    unused: list[str] = []
    for root, folders, names in os.walk(folder):
        prefix = "" if root == str(folder) else f"{os.path.relpath(root, folder)}/"
        unused += [f"{prefix}{name}/ (a link)" for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            stem, _, part = name.rpartition(".")
            if stem and is_used(part) and not is_hidden(prefix + name):
                samples.setdefault(prefix + stem, []).append(part)
            elif not is_hidden(prefix + name):
                unused.append(prefix + name)
    _join_numbered(samples)
    alone = [stem for stem, parts in samples.items() if "/" in stem and "json" not in map(str.lower, parts)]
    unused += [f"{stem}.{part}" for stem in alone for part in samples.pop(stem)]
    return [(stem, tuple(sorted(samples[stem]))) for stem in sorted(samples)], sorted(unused)


def _join_numbered(samples: dict[str, list[str]]) -> None:
    """Move NNN.0.jpg, NNN.1.jpg, … to the sample of NNN.json, as in shards."""
    for name in list(samples):
        stem, _, suffix = name.rpartition(".")
        if suffix.isdecimal() and "json" in samples.get(stem, ()) and "json" not in samples[name]:
            samples[stem] += [f"{suffix}.{part}" for part in samples.pop(name)]


def has_samples(names: Iterable[str]) -> bool:
    """Return whether files of a folder are those of a sample: a .json and a .txt of one name."""
    texts = {name for name in names if name.endswith((".json", ".txt")) and not is_hidden(name)}
    return any(name.endswith(".json") and f"{name.removesuffix('.json')}.txt" in texts for name in texts)
