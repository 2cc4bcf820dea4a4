"""A reference to an image -> its bytes, its size in pixels and the file suffix of its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.config.sections.data import LIMITS, Limits
from llava_mcore.data.processors.image_header import (
    ImageFormatError,
    depth_problem,
    ratio_problem,
    read_header,
    size_problem,
)
from llava_mcore.data.processors.images import decode_image
from llava_mcore.errors import DataError
from llava_mcore.prepare.media.item_options import NO_RESIZING, Resizing, image_sizes, resize
from llava_mcore.prepare.media.references import IMAGE, read_reference
from llava_mcore.prepare.row_types import BadSample, ImageFile, Reason

EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "DIB": "bmp"}
"""File suffixes that are not the format's name; many phones write MPO into .jpg files."""


def read_image(
    reference: Any, folder: Path, *, decode: bool = False, limits: Limits = LIMITS, resizing: Resizing = NO_RESIZING
) -> ImageFile:
    """Find an image and read its header.

    Args:
        reference: see `read_reference`; a mapping may have sizes too (see `image_sizes`).
        decode: decode all of it, to check that it is complete.
        resizing: how an image with such sizes is resized.

    Raises:
        BadSample: it is missing, not on disk, of an unsupported format, too large, or broken, or has sizes that cannot
            be used.
    """
    sizes = image_sizes(reference)
    data = read_reference(reference, folder, limits.sample_bytes, IMAGE)
    extension, size = inspect(data, limits)
    try:
        if sizes is not None:
            data = resize(data, sizes, resizing, limits)
            extension, size = inspect(data, limits)
        elif decode:
            decode_image(data, limits.image_pixels)
    except DataError as error:
        raise BadSample(Reason.IMAGE_BROKEN, str(error)) from error
    return ImageFile(data, extension, size)


def inspect(data: bytes, limits: Limits = LIMITS) -> tuple[str, tuple[int, int]]:
    """Return the file suffix and (width, height) of an image as training decodes it, from its header.

    Raises BadSample for an image that training would refuse.
    """
    try:
        header = read_header(data, limits.image_pixels)
    except ImageFormatError as error:
        raise BadSample(Reason.IMAGE_FORMAT, str(error)) from error
    except DataError as error:
        raise BadSample(Reason.IMAGE_BROKEN, str(error)) from error
    for reason, problem in (
        (Reason.TOO_LARGE, size_problem(header.size, limits.image_pixels, "--max-image-pixels")),
        (Reason.SHAPE, ratio_problem(header.size)),
        (Reason.IMAGE_FORMAT, depth_problem(header.mode)),
    ):
        if problem is not None:
            raise BadSample(reason, f"an image cannot be used: {problem}")
    height, width = header.size
    return EXTENSIONS.get(header.format, header.format.lower()), (width, height)
