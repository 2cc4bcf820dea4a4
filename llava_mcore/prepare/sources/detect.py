"""Detects the kind of source of a path from its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.errors import DataError
from llava_mcore.files.near_match import require_exists
from llava_mcore.files.regular import kind_of
from llava_mcore.prepare.record_layouts import Keys
from llava_mcore.prepare.sources.array import LARGEST_ELEMENT, JsonArray
from llava_mcore.prepare.sources.arrow import ArrowTable
from llava_mcore.prepare.sources.base import SourceFile
from llava_mcore.prepare.sources.formats import Format
from llava_mcore.prepare.sources.lines import BOM, JsonLinesSource
from llava_mcore.prepare.sources.parquet import ParquetTable
from llava_mcore.prepare.sources.remote_file import RemoteFolder
from llava_mcore.prepare.sources.tars import TarShard
from llava_mcore.prepare.sources.triples import TripleFolder, has_samples

LAYOUTS = {"llava": "conversations", "sharegpt": "messages", "openai": "messages"}
"""Formats whose rows must have this field."""
JSON_SUFFIXES = (".json", ".jsonl")
SPLITS = ("train", "validation", "val", "valid", "dev", "test")
HEAD = 4096
"""Bytes of a .json file that are read to detect its kind."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How to read a path."""

    format: Format = "auto"
    image_dir: Path | None = None
    """Base folder of relative paths of images; None: the folder of the file that names them."""
    split: str = "train"
    """The split of a Hugging Face dataset to use if it has several."""
    keys: Keys = field(default_factory=Keys)
    most_bytes: int = LIMITS.sample_bytes
    """Maximum bytes of a row with its images."""
    frames_fps: float | None = None
    """Frames per second of videos that are lists of frames and do not say it; None: unknown."""

    @property
    def layout(self) -> str | None:
        """The field that every row must have, if the format says so."""
        return LAYOUTS.get(self.format)


def find_files(path: Path | RemoteFolder, how: Opening) -> list[SourceFile]:
    """Return the source files of a path, or of a URL, in order.

    Raises DataError if there are none, they have several formats, or not the requested one.
    """
    if isinstance(path, RemoteFolder):
        files = _remote_files(path, how)
    else:
        require_exists(path)
        files = _files_of_folder(path, how) if path.is_dir() else [_open_file(path, path.parent, how)]
    wrong = [file.name for file in files if not _fits(file, how.format)]
    if wrong:
        raise DataError(f"{path}: {', '.join(wrong[:5])} cannot be read with --format {how.format}; {ALLOWED}")
    if isinstance(files[0], (TripleFolder, TarShard)) and (how.keys.image or how.keys.answer):
        raise DataError(f"{path}: samples of several files have their image and answer in files, not under a key")
    return files


def _fits(file: SourceFile, expected: Format) -> bool:
    if expected == "auto":
        return True
    if expected == "vqa":
        return isinstance(file, (TripleFolder, TarShard))
    if expected in LAYOUTS:
        return isinstance(file, (JsonLinesSource, JsonArray))
    return isinstance(file, (ParquetTable, ArrowTable))


def _open_file(path: Path, root: Path, how: Opening) -> SourceFile:
    """Open a file, to be named relative to root."""
    name, folder = str(path.relative_to(root)), how.image_dir or path.parent
    if not path.is_file():
        kind = kind_of(path.stat().st_mode) if path.exists() else "a broken link"
        raise DataError(f"{path} is {kind}, not a regular file")
    open_as = FILE_KINDS.get(path.suffix.lower())
    if open_as is None:
        raise DataError(f"{path} has an unknown format; {ALLOWED}")
    return open_as(path, name, folder, how)


def _open_table(kind: type[ParquetTable] | type[ArrowTable]) -> OpenFile:
    """Return how a table is opened, of which only columns that mean something are read."""
    return lambda path, name, folder, how: kind(path, name, folder, how.keys.all(), how.most_bytes)


def _open_json(path: Path, name: str, folder: Path, how: Opening) -> SourceFile:
    return _json_kind(path)(path, name, folder, how.most_bytes)


def _json_kind(path: Path) -> type[JsonArray] | type[JsonLinesSource]:
    """Distinguish a list, which may be one long line, from JSON lines by the first character."""
    with path.open("rb") as file:
        head = file.read(HEAD).removeprefix(BOM).lstrip()
        if head.startswith(b"["):
            return JsonArray
        file.seek(0)
        first = file.readline(LARGEST_ELEMENT).removeprefix(BOM)
    try:
        is_row = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):  # UnicodeDecodeError too
        is_row = False
    if not is_row:
        raise DataError(f"{path} is neither a list of objects nor JSON lines; it begins with {head[:60]!r}")
    return JsonLinesSource


def _files_of_folder(folder: Path, how: Opening) -> list[SourceFile]:
    if (folder / "dataset_dict.json").is_file():
        if not (folder / how.split).is_dir():
            parts = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir()))
            raise DataError(f"{folder} has no part {how.split!r}, only {parts}; choose with --source-split")
        folder = folder / how.split
    if (folder / "state.json").is_file():
        return [_open_file(folder / name, folder, how) for name in _saved_files(folder / "state.json")]
    triples = _folder_of_samples(folder, how.split)
    if triples is not None:
        return [TripleFolder(triples, triples.name, how.image_dir or triples, how.most_bytes)]
    return [_open_file(folder / name, folder, how) for name in choose_files(_names(folder), str(folder), how)]


def choose_files(names: Sequence[str], folder: str, how: Opening) -> list[str]:
    """Return the files of a folder that are its rows, in order: those of the one kind and split.

    Args:
        names: of all files, relative to the folder.
        folder: for messages.

    Raises:
        DataError: there are none, or it is not clear which.
    """
    by_suffix: dict[str, list[str]] = {}
    for name in names:
        if _suffix(name) in FILE_KINDS:
            by_suffix.setdefault(_suffix(name), []).append(name)
    data = [suffix for suffix in by_suffix if suffix not in JSON_SUFFIXES] or list(by_suffix)
    if len(data) != 1:
        if not data:
            raise DataError(f"{folder} has no files of a supported kind. {ALLOWED}")
        raise DataError(f"{folder} has {' and '.join(sorted(data))} files; name one file or folder. {ALLOWED}")
    paths = _of_split(sorted(map(PurePosixPath, by_suffix[data[0]])), folder, how.split)
    folders = sorted({str(path.parent) for path in paths})
    if len(folders) > 1 and data[0] == ".parquet":
        raise DataError(f"{folder} has tables in several folders; choose one of {', '.join(folders[:10])}")
    return [str(path) for path in paths]


def _remote_files(folder: RemoteFolder, how: Opening) -> list[SourceFile]:
    """Open the files of a URL that are read where they are."""
    base = how.image_dir or Path(folder.url)
    return [
        ParquetTable(file, name, base, how.keys.all(), how.most_bytes)
        if _suffix(name) == ".parquet"
        else JsonLinesSource(file, name, base, how.most_bytes)
        for name, file in folder.files
    ]


def _folder_of_samples(folder: Path, split: str) -> Path | None:
    """Return the folder whose files, perhaps in subfolders, are samples of several files; None if they are rows."""
    walk = os.walk(folder)
    _, folders, names = next(walk)
    if has_samples(names):
        return folder
    if any(_suffix(name) in FILE_KINDS and not name.startswith(".") for name in names):
        return None
    if not any(has_samples(names) for root, _, names in walk if "/." not in os.path.relpath(root, folder)):
        return None
    splits = set(SPLITS) & set(folders)
    if splits and split not in splits:
        raise DataError(f"{folder} has no part {split!r}, only {', '.join(sorted(splits))}; choose with --source-split")
    return folder / split if splits else folder


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _names(folder: Path) -> list[str]:
    """Return the names of the data files of a folder and its subfolders, without hidden ones."""
    data_files: list[str] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        data = [name for name in names if _suffix(name) in FILE_KINDS and not name.startswith(".")]
        data_files += [str(Path(root, name).relative_to(folder)) for name in data]
    return data_files


def _of_split(paths: Sequence[PurePosixPath], folder: str, split: str) -> list[PurePosixPath]:
    """Return the files whose names or folders start with the split, or all if no name refers to a split."""
    spoken = {path: {p.partition("-")[0].partition(".")[0] for p in path.parts} for path in paths}
    known = set(SPLITS) & {word for words in spoken.values() for word in words}
    if not known:
        return list(paths)
    chosen = [path for path in paths if split in spoken[path]]
    if not chosen:
        raise DataError(f"{folder} has no part {split!r}, only {', '.join(sorted(known))}; choose with --source-split")
    return chosen


def _saved_files(state: Path) -> list[str]:
    """Return the names of the Arrow files of a saved Hugging Face dataset, in order."""
    try:
        return [str(file["filename"]) for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{state} was not saved by `datasets`: {error!r}") from error


OpenFile = Callable[[Path, str, Path, Opening], SourceFile]
"""Opens a file: its path, its name for users, the base folder of relative paths in it, and the options."""
FILE_KINDS: dict[str, OpenFile] = {
    ".json": _open_json,
    ".jsonl": lambda path, name, folder, how: JsonLinesSource(path, name, folder, how.most_bytes),
    ".parquet": _open_table(ParquetTable),
    ".arrow": _open_table(ArrowTable),
    ".tar": lambda path, name, folder, how: TarShard(path, name, folder, how.most_bytes),
}
"""How files are opened, by suffix."""
ALLOWED = (
    f"supported are {', '.join([*FILE_KINDS][:-1])} and {[*FILE_KINDS][-1]} files, a folder of these, a saved Hugging "
    "Face dataset, and a folder of NNN.jpg, NNN.txt and NNN.json files"
)
