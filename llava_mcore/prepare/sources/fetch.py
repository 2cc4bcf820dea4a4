"""Sources at a URL (`hf://datasets/…`, `hdfs://…`, `s3://…`, `https://…`): their files are fetched through fsspec.

Rows are read in an order of their own, and again if a run continues, so the files are kept beside the shards. Only
files that have changed since are fetched again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from llava_mcore.errors import DataError, problems
from llava_mcore.files.atomic import move, replace_file

AT_ONCE = 8
"""Files that are fetched at the same time."""
LISTING = ".listing.json"
FETCH_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError)
"""Errors of fsspec's file systems and of the libraries below them."""
CHANGES = ("ETag", "etag", "blob_id", "checksum", "created", *("mtime", "modificationTime", "LastModified"))
"""Keys under which file systems say which version of a file there is."""


def is_url(text: str) -> bool:
    """Return whether a source is not a path on this machine."""
    return "://" in text


def fetch(url: str, folder: Path, on_file: Callable[[str], None] = lambda name: None) -> Path:
    """Fetch a file, or all files of a folder, and return their path below `folder`.

    Args:
        url: of any file system that fsspec knows.
        folder: kept from one run to the next.
        on_file: called with the name of each file before it is fetched.

    Raises:
        DataError: the URL cannot be read, or there is nothing.
    """
    place = folder / sha256(url.encode()).hexdigest()[:16]
    try:
        files, root = fsspec.core.url_to_fs(url)
        listing = _list_files(files, root)
    except FETCH_ERRORS as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    if not listing:
        raise DataError(f"{url} has no files")
    place.mkdir(parents=True, exist_ok=True)
    # Only files that are new or have changed are fetched; those that are gone are removed.
    known = json.loads((place / LISTING).read_text()) if (place / LISTING).is_file() else {}
    versions = {name: _version(info) for name, info in listing.items()}
    missing = [name for name in listing if known.get(name) != versions[name] or not (place / name).is_file()]
    for name in known.keys() - listing.keys():
        (place / name).unlink(missing_ok=True)

    def get(name: str) -> str | None:
        on_file(name)
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.part")
        try:
            files.get_file(listing[name]["name"], str(partial))
        except FETCH_ERRORS as error:
            return f"{name}: {error}"
        move(partial, target)
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        errors = [error for error in pool.map(get, missing) if error is not None]
    if errors:
        raise DataError(problems(f"{url} could not be fetched; run the same command to continue", errors))
    replace_file(place / LISTING, json.dumps(versions).encode())
    return place / next(iter(listing)) if files.isfile(root) else place


def _list_files(files: fsspec.AbstractFileSystem, root: str) -> dict[str, Mapping[str, Any]]:
    """Return what a file system says of the files, by their names below the root. Hidden files are left out."""
    if files.isfile(root):
        return {PurePosixPath(root).name: files.info(root)}
    listed = {str(PurePosixPath(name).relative_to(root)): info for name, info in files.find(root, detail=True).items()}
    hidden = {name for name in listed if any(part.startswith(".") for part in name.split("/"))}  # also `..`
    return {name: info for name, info in sorted(listed.items()) if name not in hidden}


def _version(info: Mapping[str, Any]) -> list[str]:
    return [str(info.get("size")), *(f"{key} {info[key]}" for key in CHANGES if info.get(key) is not None)]
