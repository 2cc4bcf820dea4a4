"""From the sources of a command to paths: those at a URL are read where they are, or fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llava_mcore.prepare.journal import Journal
from llava_mcore.prepare.shard_plan import SourcePaths
from llava_mcore.prepare.shard_processes import PrepareProgress
from llava_mcore.prepare.sources.detect import Opening
from llava_mcore.prepare.sources.fetch import fetch, is_url
from llava_mcore.prepare.sources.remote import read_in_place
from llava_mcore.prepare.sources.remote_file import RemoteFolder


def locate(
    sources: Sequence[str], how: Opening, folder: Path, progress: PrepareProgress, *, keep_order: bool
) -> SourcePaths:
    """Return the sources as `prepare` takes them.

    Args:
        sources: paths and URLs.
        folder: of the shards; what must be fetched is kept in its scratch folder.
        keep_order: whether rows keep their order.

    Raises:
        DataError: a URL cannot be read, or its files have no room.
    """
    paths: list[Path | RemoteFolder] = []
    for source in sources:
        if not is_url(source):
            paths.append(Path(source))
            continue
        progress.begin(f"looking at {source}", None)
        remote = read_in_place(source, how, keep_order=keep_order)
        if remote is not None:
            paths.append(remote)
            continue
        with Journal(folder) as journal:  # so that no other command writes there
            progress.begin(f"fetching {source}", None)
            paths.append(fetch(source, journal.scratch / "source"))
    return SourcePaths(tuple(paths), how)
