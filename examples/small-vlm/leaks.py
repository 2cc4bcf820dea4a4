"""Which emoji the shards hold: read from the shards themselves, not from what should be in them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path


def codes_in(folder: Path) -> set[str]:
    """Return the codes of the emoji whose conversations are in a folder of shards: an id begins with the code."""
    found = set()
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.name.endswith(".json") else None
                if content is not None:
                    found.add(str(json.load(content)["source"]["id"]).split(" ", 1)[0])
    return found
