"""A reference to an image, video or audio clip in a row -> its file or its bytes."""

from __future__ import annotations

import base64
import binascii
import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from llava_mcore.errors import with_article
from llava_mcore.files.near_match import near_hint, shortened
from llava_mcore.files.regular import RefusedFileError, read_regular_file
from llava_mcore.prepare.media.arrays import ARRAY_KEY, array_as_file, described
from llava_mcore.prepare.row_types import BadSample, Reason

REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
BASE64 = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}")
"""A text that may be base64, without line breaks."""
SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF|BM|II\*\0|MM\0\*|P[1-6]\s|fLaC|OggS|ID3|\xff[\xe2-\xff]"
    rb"|....ftyp|\x1a\x45\xdf\xa3|FLV|\0\0\x01\xba",
    re.DOTALL,
)
"""Beginnings of images, audio clips and videos. A path that could be base64 does not decode to one of them."""
ENCODED, FIELDS = ("bytes", "base64", "data"), ("path", "url")
"""Fields of a reference that is an object, as `datasets`, transformers and OpenAI's format write it: with the contents,
as base64 if they are text, or with their place."""
MOST_PATH = 4096


@dataclass(frozen=True, slots=True)
class MediaReasons:
    """Why something cannot be read. `name`, `mime`: what it is, for messages, and the first part of its MIME type."""

    name: str
    mime: str
    missing: Reason
    remote: Reason
    broken: Reason


IMAGE = MediaReasons("image", "image", Reason.IMAGE_MISSING, Reason.IMAGE_REMOTE, Reason.IMAGE_BROKEN)
AUDIO = MediaReasons("audio clip", "audio", Reason.AUDIO_MISSING, Reason.AUDIO_REMOTE, Reason.AUDIO_BROKEN)
VIDEO = MediaReasons("video", "video", Reason.VIDEO_MISSING, Reason.VIDEO_REMOTE, Reason.VIDEO_BROKEN)


def read_reference(reference: Any, folder: Path, most_bytes: int, reasons: MediaReasons) -> bytes:
    """Return the bytes that a row refers to. `reference`: see `resolve`.

    Raises:
        BadSample: it is missing, not on disk, too large, or of a wrong type.
    """
    source = resolve(reference, folder, reasons)
    if isinstance(source, bytes):
        return source
    try:
        return read_regular_file(source, most_bytes)
    except (OSError, ValueError, RefusedFileError) as error:
        raise cannot_open(source, error, reasons) from error


def resolve(reference: Any, folder: Path, reasons: MediaReasons) -> bytes | Path:
    """Return the bytes in a row, or the path of the file that it names, which may not exist.

    Args:
        reference: bytes, an object with one of FIELDS, a path (absolute, or relative to folder), a file:// or a data:
            URI, or base64 as `transformers.image_utils.load_image` reads it.

    Raises:
        BadSample: it is not on disk, or of a wrong type.
    """
    # An object holds bytes, an array of samples, or a path under one of several names.
    source, field = reference, None
    if isinstance(reference, Mapping):
        if reference.get(ARRAY_KEY) is not None:
            return array_as_file(reference, reasons.name)
        field = next((name for name in (*ENCODED, *FIELDS) if reference.get(name)), None)
        source = None if field is None else reference[field]
    if isinstance(source, (bytes, bytearray)):
        return bytes(source)
    # Text is a URI, base64, or a path; a short one that is a file wins over base64.
    if not isinstance(source, str) or not source:
        raise BadSample(Reason.WRONG_TYPE, f"{with_article(reasons.name)} is {described(reference, reasons.name)}")
    if source[:5].lower() == "data:":
        return _read_data_uri(source, reasons)
    if field in ENCODED:
        return _decoded(source, "the base64 text", reasons)
    if source.startswith("file:"):
        return Path(unquote(source.removeprefix("file:").removeprefix("//").removeprefix("localhost")))
    if REMOTE.match(source):
        raise BadSample(reasons.remote, f"{shortened(source)}; download it first")
    data = _bare_base64(source)
    if data is None or (len(source) < MOST_PATH and (folder / source).is_file()):
        return folder / source
    return data


def cannot_open(path: Path, error: OSError | ValueError | RefusedFileError, reasons: MediaReasons) -> BadSample:
    """Return why a file of a row cannot be opened. A missing file's near match is named."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        expected = f"neither a file nor base64 of {with_article(reasons.name)}"
        return BadSample(reasons.missing, f"{shortened(path.name)}: {expected}")
    if isinstance(error, OSError):
        return BadSample(reasons.missing, f"{shortened(str(path))}: {error.strerror}{near_hint(path)}")
    if isinstance(error, RefusedFileError):
        return BadSample(reasons.missing, str(error))
    return BadSample(reasons.missing, f"{shortened(repr(str(path)))}: {error}")  # not a valid file name


def _read_data_uri(uri: str, reasons: MediaReasons) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        expected = f"data:{reasons.mime}/…;base64,…"
        raise BadSample(reasons.broken, f"a data URI must be {expected}, found {shortened(uri):.60}")
    return _decoded(unquote(payload), "the data URI", reasons)


def _decoded(text: str, subject: str, reasons: MediaReasons) -> bytes:
    try:
        return base64.b64decode(_joined(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadSample(reasons.broken, f"{subject} {shortened(text):.60} is not base64: {error}") from error


def _joined(text: str) -> str:
    """Return base64 without line breaks, in the usual alphabet and with padding."""
    text = "".join(text.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
    return text + "=" * (-len(text) % 4)


def _bare_base64(text: str) -> bytes | None:
    """Return the contents of a text that is base64 of an image, video or audio clip; None if it is a path."""
    joined = "".join(text.split())
    if BASE64.fullmatch(joined) is None:
        return None
    try:
        data = base64.b64decode(_joined(joined), validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if SIGNATURE.match(data) else None
