"""Sources at a URL (`hf://datasets/…`, `hdfs://…`, `s3://…`, `https://…`) whose files are fetched through fsspec.

They are those that cannot be read where they are (`remote.py`). Their rows are read in an order of their own, and again
if a run continues, so the files are kept beside the shards. Only files that have changed since are fetched again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from llava_mcore.errors import DataError, problems
from llava_mcore.files.atomic import move, replace_file
from llava_mcore.files.sizes import size_text
from llava_mcore.prepare.sources.file_systems import file_system
from llava_mcore.prepare.sources.remote_file import fetch_errors, list_files, version_of

AT_ONCE = 8
"""Files that are fetched at the same time."""
LISTING = ".listing.json"


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
        files, root = file_system(url)
        listing, is_file = list_files(files, root)
    except fetch_errors() as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    if not listing:
        raise DataError(f"{url} has no files")
    place.mkdir(parents=True, exist_ok=True)
    # Only files that are new or have changed are fetched; those that are gone are removed.
    known = json.loads((place / LISTING).read_text()) if (place / LISTING).is_file() else {}
    versions = {name: [*version_of(info)] for name, info in listing.items()}
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
        except fetch_errors() as error:
            return f"{name}: {error}"
        move(partial, target)
        return None

    _require_room(url, place, sum(int(listing[name].get("size") or 0) for name in missing))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        errors = [error for error in pool.map(get, missing) if error is not None]
    if errors:
        raise DataError(problems(f"{url} could not be fetched; run the same command to continue", errors))
    replace_file(place / LISTING, json.dumps(versions).encode())
    return place / next(iter(listing)) if is_file else place


def _require_room(url: str, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder}: {url} is fetched here, which takes {size_text(needed)}; {size_text(free)} are free. Free "
            "some, or choose another --out. Parquet files with images in their rows, and with --keep-order JSON lines, "
            "are not fetched (docs/prepare.md, Sources at a URL)"
        )
