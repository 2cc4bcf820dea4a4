"""Which files at a URL are read where they are: tables whose rows have their media, and JSON lines in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from llava_mcore.errors import DataError
from llava_mcore.prepare.sources.detect import Opening, choose_files
from llava_mcore.prepare.sources.file_systems import file_system
from llava_mcore.prepare.sources.parquet import ParquetTable
from llava_mcore.prepare.sources.remote_file import RemoteFile, RemoteFolder, fetch_errors, list_files, version_of

TEXTS = {"", ".csv", ".json", ".jsonl", ".license", ".md", ".parquet", ".py", ".tsv", ".txt", ".yaml", ".yml"}
"""Suffixes of files that are no media of rows."""
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
        files, root = file_system(url)
        listing, is_file = list_files(files, root)
    except fetch_errors() as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    # Kinds of files whose rows are read by ranges.
    suffixes = {PurePosixPath(name).suffix.lower() for name in listing}
    readable = {".parquet", ".jsonl"} if keep_order else {".parquet"}
    if not suffixes & readable or any(PurePosixPath(name).name in SAVED for name in listing):
        return None
    names = [*listing] if is_file else choose_files([*listing], url, how)
    if not {PurePosixPath(name).suffix.lower() for name in names} <= readable:
        return None
    # Sizes and versions, which say later whether a file has changed.
    try:
        infos = [files.info(listing[name]["name"]) for name in names]  # a listing may say less, or say it otherwise
    except fetch_errors() as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    if any(info.get("size") is None for info in infos):
        return None
    places = [url if is_file else f"{url.rstrip('/')}/{name}" for name in names]
    remotes = [RemoteFile(p, int(i["size"]), version_of(i)) for p, i in zip(places, infos, strict=True)]
    chosen = tuple(zip(names, remotes, strict=True))
    has_media = how.image_dir is None and not suffixes <= TEXTS
    if not _takes_ranges(chosen) or (has_media and not _rows_have_media(chosen, how)):
        return None
    return RemoteFolder(url, chosen)


def _takes_ranges(chosen: Sequence[tuple[str, RemoteFile]]) -> bool:
    """Return whether the server sends a part of a file, which not every web server does."""
    file = next((file for _, file in chosen if file.size > 1), None)
    if file is None:
        return True
    try:
        files, path = file_system(file.url)
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
