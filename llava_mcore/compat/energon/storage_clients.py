"""multistorageclient 1.3.1 forgets its clients in a forked process, in which Energon's paths still use them.

Their sockets are open in both processes, so each may read the other's answers. A search of Python's objects does not
find those that are excluded from garbage collections.
"""

from __future__ import annotations

import functools
import os

from multistorageclient import StorageClient, shortcuts

from llava_mcore.compat.required import required

INHERITED: set[StorageClient] = set()
"""All clients that this process, or the one that it was forked from, has had when it was forked."""


@functools.cache
def remember_clients_at_forks() -> None:
    """Fill INHERITED before every later fork. A second call changes nothing.

    Raises:
        AttributeError: this version of multistorageclient keeps its clients elsewhere.
    """
    required(shortcuts, "_STORAGE_CLIENT_CACHE")
    os.register_at_fork(before=_remember)


def _remember() -> None:
    INHERITED.update(shortcuts._STORAGE_CLIENT_CACHE.values())
