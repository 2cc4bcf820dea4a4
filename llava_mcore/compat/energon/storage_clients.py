"""multistorageclient 1.3.1 takes no storage providers but its own, and forgets its clients in a forked process.

Energon's paths still use the clients there. Their sockets are open in both processes, so each may read the other's
answers. A search of Python's objects does not find those that are excluded from garbage collections.
"""

from __future__ import annotations

import functools
import os

from multistorageclient import StorageClient, config, providers, schema, shortcuts
from multistorageclient.types import StorageProvider

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


def register_provider(kind: str, provider: type[StorageProvider]) -> None:
    """Let profiles name a storage provider by its `type`, as they name those of multistorageclient.

    Raises:
        AttributeError: this version of multistorageclient finds its providers elsewhere.
        KeyError: or it checks the configuration file otherwise.
    """
    kinds = required(config, "STORAGE_PROVIDER_MAPPING")
    profile = required(schema, "CONFIG_SCHEMA")["properties"]["profiles"]["additionalProperties"]
    allowed = profile["properties"]["storage_provider"]["properties"]["type"]["enum"]
    if kind not in allowed:
        allowed.append(kind)
    kinds[kind] = provider.__name__
    setattr(providers, provider.__name__, provider)
