"""Data in an object store: paths, settings of the storage client, and its errors.

Energon reads everything through multi-storage-client, whose profiles (`msc://PROFILE/path`) are in its own
configuration file; local paths are its default profile.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import multistorageclient as msc
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta
from multistorageclient import StorageClientConfig
from multistorageclient.types import RetryableError

from llava_mcore.compat.energon.storage_clients import INHERITED, register_provider
from llava_mcore.data.storage.fsspec_store import NAME as FSSPEC
from llava_mcore.data.storage.fsspec_store import FsspecStorageProvider
from llava_mcore.data.storage.shard_files import META_ERRORS, OFFSET
from llava_mcore.errors import DataError

STORAGE_ERRORS = (OSError, RuntimeError, RetryableError)
"""Errors of a storage client; their text contains the status of the server."""
CHECKED_SHARDS = 16
"""Shards of a remote dataset to check: each takes four requests."""
PROFILE_ADVICE = (
    "describe the store in multi-storage-client's configuration file (MSC_CONFIG or ~/.msc_config.yaml), "
    "see docs/object_stores.md"
)


register_provider(FSSPEC, FsspecStorageProvider)


def locate(path: Path | str) -> EPath:
    """Return the location of a data path: a local path, or a URL (`msc://…`, or one that the client maps to a profile).

    Raises DataError for a URL without a profile.
    """
    if isinstance(path, Path) or "://" not in path:
        return EPath(Path(path))
    try:
        if path.startswith("msc://"):
            return EPath(path)
        client, inner = msc.resolve_storage_client(path)
        return EPath(f"msc://{client.profile}/{inner}")
    except (ValueError, ImportError, *STORAGE_ERRORS) as error:
        raise DataError(f"{path} cannot be reached: {error}; {PROFILE_ADVICE}") from error


def check_profile(location: EPath) -> list[str]:
    """Return what is wrong with the settings of a remote location's profile."""
    settings, file = StorageClientConfig.read_msc_config()
    profile = (settings or {}).get("profiles", {}).get(location.profile, {})
    if location.is_local() or (profile.get("caching_enabled") and "cache" in (settings or {})):
        return []
    return [
        f"profile {location.profile} of {location} has no cache, so every shard would be held in memory as long as it "
        f"is open (16 of them in every stream): add a cache section and caching_enabled: true in {file or 'a file'}; "
        f"{PROFILE_ADVICE}"
    ]


def check_remote_shards(leaf: EPath, *, split_part: str = "train", split_config: str = "split.yaml") -> list[str]:
    """Return what is wrong with the shards of a remote dataset, one message each. It checks 16 of them, evenly spread.

    Raises errors of the storage client if the store cannot be read.
    """
    if leaf.is_file():
        return _check_jsonl(leaf)
    try:
        shards = WebdatasetMeta.from_config(leaf, split_part=split_part, split_config=split_config).shards
    except META_ERRORS as error:
        if not isinstance(error, FileNotFoundError) and storage_message(error) is not None:
            raise
        return [f"{leaf / '.nv-meta'} is not valid, prepare the dataset again: {error!r}"]
    step = -(-len(shards) // CHECKED_SHARDS)
    looked_at = {shard.name: shard for shard in [*shards[::step], shards[-1]]}
    checks = (_check_shard(shard.path, shard.count) for shard in looked_at.values())
    return [problem for problem in checks if problem is not None]


def _check_jsonl(file: EPath) -> list[str]:
    index = file.with_suffix(".jsonl.idx")
    ends = index.read_bytes()[-OFFSET.size :] if index.is_file() else b""
    if len(ends) == OFFSET.size and OFFSET.unpack(ends)[0] == file.size():
        return []
    return [f"{file} and its index {index.name} do not belong together; index it with\nenergon prepare {file}"]


def _check_shard(shard: EPath, count: int) -> str | None:
    index = shard.with_suffix(".tar.idx")
    try:
        num_offsets, size = index.size() // OFFSET.size, shard.size()
        with index.open("rb") as file:
            file.seek(OFFSET.size * max(0, num_offsets - 1))
            last = file.read(OFFSET.size)
    except FileNotFoundError as error:
        return f"{shard} and its .tar.idx are not both there: {error}"
    if num_offsets != count + 1:
        return f"{index} lists {num_offsets - 1} samples, .nv-meta/.info.json {count}; upload it again"
    end = OFFSET.unpack(last)[0]
    if size < end:
        return f"{shard} has {size} bytes, but its index needs {end}: upload it again"
    return None


def storage_message(error: BaseException) -> str | None:
    """Return the storage client's message if the error comes from one, else None."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    if not isinstance(error, STORAGE_ERRORS) or not any(name.startswith("multistorageclient.") for name in modules):
        return None
    cause = error.__cause__ if isinstance(error, OSError) and isinstance(error.__cause__, STORAGE_ERRORS) else error
    return f"{type(cause).__name__}: {cause}"


def reading[T](location: EPath, read: Callable[[], T]) -> T:
    """Return what `read` returns. DataError if the store of the location fails permanently."""
    try:
        return read()
    except STORAGE_ERRORS as error:
        message = storage_message(error)
        if message is None:
            raise
        raise DataError(f"{location} cannot be read: {message}") from error


def renew_connections() -> None:
    """Give a forked process its own connections, if its parent called `remember_clients_at_forks`.

    A client that the parent has used keeps open sockets, on which answers to several processes would be mixed up.
    """
    for client in INHERITED:
        if not client.is_default_profile():
            client.__setstate__(pickle.loads(pickle.dumps(client.__getstate__())))
