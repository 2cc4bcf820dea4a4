"""Pictures outside of the shards: a sample names them, and they are read from a store next to the dataset."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from megatron.energon import FileStore
from megatron.energon.epathlib import EPath

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.storage.remote import STORAGE_ERRORS
from llava_mcore.errors import DataError
from llava_mcore.files.regular import RefusedFileError, open_regular_file


def stored_pictures(
    names: Any, store: FileStore[bytes] | None, sample: dict[str, Any], *, key: str = "images"
) -> list[bytes]:
    """Return the bytes of the pictures that a sample names, in that order.

    Args:
        names: the value of `key` in the sample's json.
        store: the store that the blend gives as `aux: {images: …}` with the dataset.
        sample: the pictures' locations are added to its sources, for messages.

    Raises:
        DataError: there is no store, the names are not a list, a name is outside of the store, or a picture is missing.
        RuntimeError: the store does not answer, or refuses the request.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f'"{key}" must be a list of names, found {names!r:.80}')
    if store is None:
        raise DataError(f'"{key}" names {names[0]!r}, but the dataset has no store of pictures (aux: {{images: …}})')
    return [_picture(name, store, sample) for name in names]


def _check_file(name: str, store: FileStore[bytes]) -> None:
    """Raise DataError for a file whose reading would block or never end."""
    folder = EPath(store.get_path())
    if not folder.is_local():
        return
    try:
        open_regular_file(folder.local_path() / name, LIMITS.sample_bytes).close()
    except RefusedFileError as error:
        raise DataError(f"the picture {name!r}: {error}") from error
    except (OSError, ValueError):
        pass  # missing: it is in a tar of the store, or reading it reports the error


def _picture(name: str, store: FileStore[bytes], sample: dict[str, Any]) -> bytes:
    if PurePosixPath(name).is_absolute() or "://" in name or ".." in PurePosixPath(name).parts:
        raise DataError(f"the picture {name!r} is outside of its store; names must be relative to it")
    _check_file(name, store)
    try:
        return store.get(name, sample)
    except (FileNotFoundError, KeyError) as error:
        raise DataError(f"the picture {name!r} is not in {store.get_path()}") from error
    except STORAGE_ERRORS as error:
        # Local files fail one by one. An object store that refuses or does not answer would fail for all of them,
        # so its OSErrors become errors that do not count as a broken sample.
        if not isinstance(error, PermissionError) and isinstance(error, OSError) and error.__cause__ is None:
            raise DataError(f"the picture {name!r} in {store.get_path()} cannot be read: {error}") from error
        raise RuntimeError(f"{store.get_path()} cannot be read: {error.__cause__ or error}") from None
