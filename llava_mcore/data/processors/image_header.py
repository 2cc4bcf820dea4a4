"""The header of an encoded image: its format, its size when it is upright, and whether it can be used."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from PIL import ExifTags, Image, UnidentifiedImageError

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.samples import IMAGE_PARTS
from llava_mcore.errors import DataError
from llava_mcore.media.media import Size

# Pillow would warn about images that max_image_pixels allows.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
"""Pillow's names of the formats in samples.IMAGE_PARTS; JPEG opens MPO as well."""
OTHER_FORMATS = {
    b"\0\0\1\0": "ICO",
    b"8BPS": "PSD",
    b"%!PS": "EPS",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "SVG",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
}
"""First bytes of formats that are not supported, for messages."""
BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}
"""The same for formats in an ISO container: the bytes 8 to 12, after its size and `ftyp`."""

MOST_RATIO = 200
"""Maximum of the longer side divided by the shorter one, as Qwen's processors have it. Others enlarge the shorter side
to that of the vision tower: a line of 600 x 1 pixels would become 200 MB."""
WIDE_MODES = ("I", "F")
"""Integers of 16 and 32 bits, and floats. Pillow and transformers would clip them to 0 to 255."""
SIDEWAYS = (5, 6, 7, 8)
"""Orientations that swap height and width."""

PNG_SIGNATURE, CHUNK = b"\x89PNG\r\n\x1a\n", struct.Struct(">I4s")
CHUNK_OVERHEAD = 12  # length, name and checksum
TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
ORIENTATION_KEYS = (b"Raw profile type exif", b"XML:com.adobe.xmp", b"exif", b"xmp")
"""Keywords of text chunks in which Pillow looks for an orientation."""

DAMAGED = (
    *(ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError),
    *(EOFError, struct.error, Image.DecompressionBombError),
)
"""Errors that Pillow raises for invalid bytes: a damaged PNG is a SyntaxError, a wrong EXIF tag a TypeError. Energon
would treat some of them as a bug, others as an error of the whole pack."""


class ImageFormatError(DataError):
    """An image of a format that is not supported."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The properties of an image that are known without decoding it."""

    format: str
    """Pillow's name."""
    mode: str
    """Pillow's mode of its pixels."""
    size: Size
    """Height and width, upright."""


def read_header(data: bytes, most_pixels: int = LIMITS.image_pixels) -> ImageHeader:
    """Return the header of an image; only that is read, except of a PNG with an orientation after its pixels.

    A larger image than `most_pixels` is never decoded; its height and width may then be swapped.

    Raises:
        ImageFormatError: the format is not supported.
        DataError: the bytes are not an image.
    """
    with reporting_damage(data):
        image = open_image(data)
        if image.width * image.height <= most_pixels and _has_late_orientation(data):
            image.load()
        width, height = image.size
        size = (width, height) if _turns_sideways(image) else (height, width)
        return ImageHeader(str(image.format), image.mode, size)


def size_problem(size: Size, most_pixels: int, limit: str = "data.max_image_pixels") -> str | None:
    """Return why an image has too many pixels. `limit`: the setting to name."""
    height, width = size
    if height * width <= most_pixels:
        return None
    return f"it has {width} x {height} pixels; the limit is {most_pixels} ({limit})"


def ratio_problem(size: Size) -> str | None:
    """Return why an image is too narrow to be resized."""
    height, width = size
    if max(size) <= MOST_RATIO * min(size):
        return None
    return (
        f"it has {width} x {height} pixels: the longer side may be at most {MOST_RATIO} times the shorter one; crop it"
    )


def depth_problem(mode: str) -> str | None:
    """Return why the pixels of a mode are not supported."""
    if not mode.startswith(WIDE_MODES):
        return None
    return (
        f"it is gray with more than 8 bits per pixel (Pillow's mode {mode}), which would become white or black: "
        "convert it to 8 bits"
    )


def check_header(header: ImageHeader, most_pixels: int) -> None:
    """Raise ValueError for an image that cannot be used."""
    problem = size_problem(header.size, most_pixels) or ratio_problem(header.size) or depth_problem(header.mode)
    if problem is not None:
        raise ValueError(problem)


def image_size(data: bytes, most_pixels: int = LIMITS.image_pixels) -> Size:
    """Return height and width of an image as `decode_image` returns it, from its header.

    Raises DataError if the bytes are not an image, or one that cannot be used.
    """
    header = read_header(data, most_pixels)
    with reporting_damage(data):
        check_header(header, most_pixels)
    return header.size


@contextlib.contextmanager
def reporting_damage(data: bytes) -> Iterator[None]:
    """Report errors of decoding an image as DataError."""
    start = f"the image cannot be decoded ({len(data)} bytes)"
    try:
        yield
    except UnidentifiedImageError as error:
        other = _other_format(data)
        if other is None:
            raise DataError(f"{start}: no known format") from error
        raise ImageFormatError(
            f"{start}: no known format, it seems to be {other}; supported: {', '.join(IMAGE_PARTS)}"
        ) from error
    except DAMAGED as error:
        raise DataError(f"{start}: {error}") from error


def open_image(data: bytes) -> Image.Image:
    """Open an image in a supported format; Pillow passes others to programs (EPS) or plugins."""
    return Image.open(BytesIO(data), formats=FORMATS)


def orientation_of(image: Image.Image) -> int:
    """Return the orientation by which an opened image is turned, from EXIF or XMP before its pixels; 1: upright."""
    # A PNG's own method would decode it.
    return Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)


def _turns_sideways(image: Image.Image) -> bool:
    """Return whether decoding swaps the width and height that an opened image has."""
    is_sideways = orientation_of(image) in SIDEWAYS
    if image.format != "TIFF":
        return is_sideways
    # The size of an opened TIFF is already the upright one if the orientation is in its tag, but not if it is in XMP.
    tag = image.tag_v2.get(ExifTags.Base.Orientation)  # type: ignore[attr-defined]
    return is_sideways != (tag in SIDEWAYS)


def _has_late_orientation(data: bytes) -> bool:
    """Return whether a PNG may have its orientation after its pixels, where Pillow only finds it by decoding them."""
    if not data.startswith(PNG_SIGNATURE):
        return False
    offset, is_late = len(PNG_SIGNATURE), False
    while offset + CHUNK.size <= len(data):
        length, name = CHUNK.unpack_from(data, offset)
        start = offset + CHUNK.size
        if is_late and name == b"eXIf":
            return True
        if is_late and name in TEXT_CHUNKS and data[start : start + length].partition(b"\0")[0] in ORIENTATION_KEYS:
            return True
        if name == b"IEND":
            return False
        is_late = is_late or name == b"IDAT"
        offset += CHUNK_OVERHEAD + length
    return False


def _other_format(data: bytes) -> str | None:
    """Return the name of a known format that is not supported."""
    if data[4:8] == b"ftyp":
        return BRANDS.get(data[8:12])
    start = data[:64].lstrip()
    return next(
        (name for first, name in OTHER_FORMATS.items() if data.startswith(first) or start.startswith(first)), None
    )
