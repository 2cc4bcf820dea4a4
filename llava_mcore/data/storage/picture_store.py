"""Pictures that do not lie in the shards: named by a sample, read from a store beside the dataset when it is needed."""

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
        names: what `key` of the sample's json holds.
        store: what the blend names as `aux: {images: …}` beside the dataset.
        sample: the locations of the pictures are added to its sources, for messages.

    Raises:
        DataError: no store; no list of names; a name that leads out of the store; a picture that is not there.
        RuntimeError: the store does not answer or refuses.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f'"{key}" must be a list of names, found {names!r:.80}')
    if store is None:
        raise DataError(f'"{key}" names {names[0]!r}, but the dataset has no store of pictures (aux: {{images: …}})')
    return [_picture(name, store, sample) for name in names]


def _check_file(name: str, store: FileStore[bytes]) -> None:
    """Raise DataError for a file of a folder that would be waited for, or read without end."""
    folder = EPath(store.get_path())
    if not folder.is_local():
        return
    try:
        open_regular_file(folder.local_path() / name, LIMITS.sample_bytes).close()
    except RefusedFileError as error:
        raise DataError(f"the picture {name!r}: {error}") from error
    except (OSError, ValueError):
        pass  # not there: in a tar of the store, or said when it is read


def _picture(name: str, store: FileStore[bytes], sample: dict[str, Any]) -> bytes:
    if PurePosixPath(name).is_absolute() or "://" in name or ".." in PurePosixPath(name).parts:
        raise DataError(f"the picture {name!r} lies outside of its store; names must be relative to it")
    _check_file(name, store)
    try:
        return store.get(name, sample)
    except (FileNotFoundError, KeyError) as error:
        raise DataError(f"the picture {name!r} is not in {store.get_path()}") from error
    except STORAGE_ERRORS as error:
        # Local files fail one by one. An object store that refuses or does not answer would fail for all of them:
        # what it raises as OSError is turned into what is not taken for a broken sample.
        if not isinstance(error, PermissionError) and isinstance(error, OSError) and error.__cause__ is None:
            raise DataError(f"the picture {name!r} in {store.get_path()} cannot be read: {error}") from error
        raise RuntimeError(f"{store.get_path()} cannot be read: {error.__cause__ or error}") from None
