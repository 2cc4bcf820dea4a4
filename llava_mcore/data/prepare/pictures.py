"""A reference to a picture -> its bytes, its size in pixels and the file suffix of its format."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from PIL import Image, UnidentifiedImageError

from llava_mcore.config.sections.data import LIMITS, Limits
from llava_mcore.data.encoding.images import DAMAGED, SIDEWAYS, decode_image, orientation_of
from llava_mcore.data.prepare.records import BadSample, Picture, Reason
from llava_mcore.data.samples import IMAGE_PARTS
from llava_mcore.errors import DataError
from llava_mcore.files.regular import RefusedFileError, read_regular_file

EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg"}
"""File suffixes that are not the format's name; many phones write MPO into .jpg files."""
REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def read_picture(reference: Any, folder: Path, *, decode: bool = False, limits: Limits = LIMITS) -> Picture:
    """Find a picture and read its header.

    Args:
        reference: bytes, {"bytes", "path"}, a path (absolute, or relative to folder), a file:// or a data: URI.
        decode: decode all of it, to check that it is complete.

    Raises:
        BadSample: it is missing, not on disk, of an unsupported format, too large, or broken.
    """
    data = _read(reference, folder, limits.sample_bytes)
    extension, size = inspect(data)
    if size[0] * size[1] > limits.picture_pixels:
        limit = f"the limit is {limits.picture_pixels} (--max-picture-pixels)"
        raise BadSample(Reason.TOO_LARGE, f"a picture of {size[0]} x {size[1]} pixels; {limit}")
    if decode:
        try:
            decode_image(data)
        except DataError as error:
            raise BadSample(Reason.IMAGE_BROKEN, str(error)) from error
    return Picture(data, extension, size)


def inspect(data: bytes) -> tuple[str, tuple[int, int]]:
    """Return the file suffix and (width, height) of a picture, after the rotation in its EXIF.

    Only the header is read. Raises BadSample.
    """
    try:
        with Image.open(BytesIO(data)) as image:
            size, name = image.size, str(image.format)
            orientation = orientation_of(image, data)
    except UnidentifiedImageError as error:
        raise BadSample(Reason.IMAGE_BROKEN, f"{len(data)} bytes of an unknown format") from error
    except DAMAGED as error:
        raise BadSample(Reason.IMAGE_BROKEN, f"{type(error).__name__}: {error}") from error
    extension = EXTENSIONS.get(name, name.lower())
    if extension not in IMAGE_PARTS:
        raise BadSample(Reason.IMAGE_FORMAT, f"{name}; known are {', '.join(IMAGE_PARTS)}")
    return extension, (size[1], size[0]) if orientation in SIDEWAYS else size


def _read(reference: Any, folder: Path, most_bytes: int) -> bytes:
    if isinstance(reference, Mapping):
        found = reference.get("bytes") or reference.get("path") or reference.get("url")
        reference = reference if found is None else found
    if isinstance(reference, (bytes, bytearray)):
        return bytes(reference)
    if not isinstance(reference, str) or not reference:
        raise BadSample(Reason.WRONG_TYPE, f"a picture is {type(reference).__name__} {reference!r:.60}")
    if reference.startswith("data:"):
        return _read_data_uri(reference)
    if reference.startswith("file:"):
        path = unquote(reference.removeprefix("file:").removeprefix("//").removeprefix("localhost"))
        return _read_file(Path(path), most_bytes)
    if REMOTE.match(reference):
        raise BadSample(Reason.IMAGE_REMOTE, f"{reference:.120}; download it first")
    return _read_file(folder / reference, most_bytes)


def _read_data_uri(uri: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise BadSample(Reason.IMAGE_BROKEN, f"a data URI must be data:image/…;base64,…, found {uri:.40}")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadSample(Reason.IMAGE_BROKEN, f"the data URI is not base64: {error}") from error


def _read_file(path: Path, most_bytes: int) -> bytes:
    try:
        return read_regular_file(path, most_bytes)
    except RefusedFileError as error:
        raise BadSample(Reason.IMAGE_MISSING, str(error)) from error
    except OSError as error:
        raise BadSample(Reason.IMAGE_MISSING, f"{path}: {error.strerror}") from error
    except ValueError as error:  # not a valid file name
        raise BadSample(Reason.IMAGE_MISSING, f"{path!r:.120}: {error}") from error
