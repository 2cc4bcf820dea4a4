"""A reference to a picture -> its bytes, its size in pixels and the file suffix of its format."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from llava_mcore.config.sections.data import LIMITS, Limits
from llava_mcore.data.encoding.images import DAMAGED, SIDEWAYS, decode_image, orientation_of
from llava_mcore.data.prepare.media.references import PICTURE, read_reference
from llava_mcore.data.prepare.row_types import BadSample, Picture, Reason
from llava_mcore.data.samples import IMAGE_PARTS
from llava_mcore.errors import DataError

EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg"}
"""File suffixes that are not the format's name; many phones write MPO into .jpg files."""


def read_picture(reference: Any, folder: Path, *, decode: bool = False, limits: Limits = LIMITS) -> Picture:
    """Find a picture and read its header.

    Args:
        reference: see `read_reference`.
        decode: decode all of it, to check that it is complete.

    Raises:
        BadSample: it is missing, not on disk, of an unsupported format, too large, or broken.
    """
    data = read_reference(reference, folder, limits.sample_bytes, PICTURE)
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
        raise BadSample(Reason.IMAGE_FORMAT, f"{name}; supported: {', '.join(IMAGE_PARTS)}")
    return extension, (size[1], size[0]) if orientation in SIDEWAYS else size
