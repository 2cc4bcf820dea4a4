"""Which files at a URL are read where they are: tables whose rows have their media, and JSON lines in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from llava_mcore.data.samples import AUDIO_PARTS, IMAGE_PARTS
from llava_mcore.errors import DataError
from llava_mcore.prepare.sources.detect import Opening, choose_files
from llava_mcore.prepare.sources.parquet import ParquetTable
from llava_mcore.prepare.sources.remote_file import RemoteFile, RemoteFolder, fetch_errors, list_files, version_of

VIDEO_SUFFIXES = ("mp4", "mkv", "mov", "webm", "avi", "mpg", "mpeg", "ts", "flv", "wmv")
MEDIA = {f".{name}" for name in (*IMAGE_PARTS, *AUDIO_PARTS, *VIDEO_SUFFIXES)}
SAVED = ("dataset_dict.json", "state.json")
"""Files of a dataset that `datasets` has saved, which is fetched as a whole."""


def read_in_place(url: str, how: Opening, *, keep_order: bool) -> RemoteFolder | None:
    """Return the files of a URL whose rows can be read where they are; None if they must be fetched.

    Parquet files can, and JSON lines in their order; shuffled lines would need a request for each. Rows that name media
    files beside them are fetched with these.

    Raises:
        DataError: the URL cannot be read, or it is not clear which of its files are meant.
    """
    try:
        files, root = fsspec.core.url_to_fs(url)
        listing = list_files(files, root)
        is_file = files.isfile(root)
    except fetch_errors() as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    suffixes = {PurePosixPath(name).suffix.lower() for name in listing}
    readable = {".parquet", ".jsonl"} if keep_order else {".parquet"}
    if not suffixes & readable or any(PurePosixPath(name).name in SAVED for name in listing):
        return None
    names = [*listing] if is_file else choose_files([*listing], url, how)
    if not {PurePosixPath(name).suffix.lower() for name in names} <= readable:
        return None
    try:
        chosen = [(name, _remote(url, name, listing[name], files, is_file=is_file)) for name in names]
    except fetch_errors() as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    has_media = how.image_dir is None and bool(suffixes & MEDIA)
    if not _takes_ranges(chosen) or (has_media and not _rows_have_media(chosen, how)):
        return None
    return RemoteFolder(url, tuple(chosen))


def _remote(
    url: str, name: str, info: Mapping[str, Any], files: fsspec.AbstractFileSystem, *, is_file: bool
) -> RemoteFile:
    if info.get("size") is None:  # a listing of links, such as a web server's
        info = files.info(info["name"])
    size = info.get("size")
    if size is None:
        raise ValueError(f"{name}: the server does not say its size")
    return RemoteFile(url if is_file else f"{url.rstrip('/')}/{name}", int(size), version_of(info))


def _takes_ranges(chosen: Sequence[tuple[str, RemoteFile]]) -> bool:
    """Return whether the server sends a part of a file, which not every web server does."""
    file = next((file for _, file in chosen if file.size > 1), None)
    if file is None:
        return True
    try:
        files, path = fsspec.core.url_to_fs(file.url)
        with files.open(path, "rb", cache_type="none") as handle:
            handle.seek(file.size - 1)
            return len(handle.read(1)) == 1
    except fetch_errors():
        return False


def _rows_have_media(chosen: Sequence[tuple[str, RemoteFile]], how: Opening) -> bool:
    """Return whether the first table has columns of bytes; media files beside it belong to a text about it then."""
    name, file = chosen[0]
    keys = how.keys.all()
    return name.endswith(".parquet") and ParquetTable(file, name, Path(), keys).has_bytes()
