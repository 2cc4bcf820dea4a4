"""A reference to a picture or sound in a row -> its bytes."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from llava_mcore.data.prepare.row_types import BadSample, Reason, type_and_value
from llava_mcore.files.regular import RefusedFileError, read_regular_file

REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MediaReasons:
    """Why something cannot be read. `name`, `mime`: what it is, for messages, and the first part of its MIME type."""

    name: str
    mime: str
    missing: Reason
    remote: Reason
    broken: Reason


PICTURE = MediaReasons("picture", "image", Reason.IMAGE_MISSING, Reason.IMAGE_REMOTE, Reason.IMAGE_BROKEN)
SOUND = MediaReasons("sound", "audio", Reason.AUDIO_MISSING, Reason.AUDIO_REMOTE, Reason.AUDIO_BROKEN)


def read_reference(reference: Any, folder: Path, most_bytes: int, reasons: MediaReasons) -> bytes:
    """Return the bytes that a row refers to.

    Args:
        reference: bytes, {"bytes", "path"}, a path (absolute, or relative to folder), a file:// or a data: URI.

    Raises:
        BadSample: it is missing, not on disk, too large, or of a wrong type.
    """
    if isinstance(reference, Mapping):
        found = reference.get("bytes") or reference.get("path") or reference.get("url")
        reference = reference if found is None else found
    if isinstance(reference, (bytes, bytearray)):
        return bytes(reference)
    if not isinstance(reference, str) or not reference:
        raise BadSample(Reason.WRONG_TYPE, f"a {reasons.name} is {type_and_value(reference)}")
    if reference.startswith("data:"):
        return _read_data_uri(reference, reasons)
    if reference.startswith("file:"):
        path = unquote(reference.removeprefix("file:").removeprefix("//").removeprefix("localhost"))
        return _read_file(Path(path), most_bytes, reasons)
    if REMOTE.match(reference):
        raise BadSample(reasons.remote, f"{reference:.120}; download it first")
    return _read_file(folder / reference, most_bytes, reasons)


def _read_data_uri(uri: str, reasons: MediaReasons) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise BadSample(reasons.broken, f"a data URI must be data:{reasons.mime}/…;base64,…, found {uri:.40}")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadSample(reasons.broken, f"the data URI is not base64: {error}") from error


def _read_file(path: Path, most_bytes: int, reasons: MediaReasons) -> bytes:
    try:
        return read_regular_file(path, most_bytes)
    except RefusedFileError as error:
        raise BadSample(reasons.missing, str(error)) from error
    except OSError as error:
        raise BadSample(reasons.missing, f"{path}: {error.strerror}") from error
    except ValueError as error:  # not a valid file name
        raise BadSample(reasons.missing, f"{path!r:.120}: {error}") from error
