"""Pictures: bytes -> pixels, or only their size."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Iterator
from io import BytesIO

import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.errors import DataError

# Pillow would warn about pictures that max_picture_pixels allows.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
SEGMENT, FRAME = struct.Struct(">HH"), struct.Struct(">BHHB")
"""Of a JPEG: marker and length of a segment; bits, height, width and components of a frame."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
"""Pillow's names of the formats in samples.IMAGE_PARTS; JPEG opens MPO as well."""
START, FRAMES, SCAN = b"\xff\xd8", (0xFFC0, 0xFFC2), 0xFFDA
PLAIN_SEGMENTS = (0xFFE0, 0xFFFE, 0xFFDB, 0xFFC4, 0xFFDD)
"""JFIF, comment, and tables. EXIF may rotate the picture, and Adobe's segment may define other colors."""

WIDE_MODES = ("I", "F")
"""Integers of 16 and 32 bits, and floats. Pillow and transformers would clip them to 0 to 255."""

SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""

DAMAGED = (
    *(ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError),
    *(EOFError, struct.error, Image.DecompressionBombError),
)
"""Errors that Pillow raises for invalid bytes: a damaged PNG is a SyntaxError, a wrong EXIF tag a TypeError. Energon
would
treat some of them as a bug, others as an error of the whole pack."""


def decode_image(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> Image.Image:
    """Decode one picture to RGB, rotated by its EXIF, exactly as transformers loads a picture.

    Raises DataError if the bytes are not a complete picture, or one of more than 8 bits per pixel and channel.
    """
    with _decoding(data):
        image = _opened(data)
        _check_header(image, most_pixels)
        return _upright(image)


def decode_pixels(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> Tensor:
    """Like `decode_image`, but return uint8 [3, h, w].

    Torchvision decodes common JPEGs: with the same library and bitwise the same result as Pillow, but a third faster,
    because the pixels are not copied.
    """
    with _decoding(data):
        image = None
        # Pillow's own parsing of the header takes longer than everything else around decoding.
        is_usual = TORCHVISION_DECODES_ALIKE and is_plain_jpeg(data, most_pixels)
        if not is_usual:
            image = _opened(data)
            _check_header(image, most_pixels)
            is_usual = TORCHVISION_DECODES_ALIKE and _is_usual_jpeg(image)
        if is_usual:
            # If it fails, Pillow may decode the picture, or raises the reason.
            with contextlib.suppress(RuntimeError):
                return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        return F.pil_to_tensor(_upright(image or _opened(data)))


def picture_size(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> tuple[int, int]:
    """Return height and width of a picture as `decode_image` returns it, from its header.

    Raises DataError if the bytes are not a picture.
    """
    with _decoding(data):
        image = _opened(data)
        _check_header(image, most_pixels)
        width, height = image.size
        return (width, height) if orientation_of(image, data) in SIDEWAYS else (height, width)


def orientation_of(image: Image.Image, data: bytes) -> int | None:
    """Return the EXIF orientation that has to be applied to an opened picture, without decoding it."""
    if image.format == "TIFF":
        return None  # Pillow rotates it while loading and already returns the upright size
    if image.format == "PNG":
        # For a PNG without EXIF before its pixels, Pillow would decode them to look for EXIF after them.
        if b"eXIf" in data:
            image.load()
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    return image.getexif().get(ExifTags.Base.Orientation)


@contextlib.contextmanager
def _decoding(data: bytes) -> Iterator[None]:
    """Report errors of decoding a picture as DataError."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise DataError(f"the picture cannot be decoded ({len(data)} bytes): no known format") from error
    except DAMAGED as error:
        raise DataError(f"the picture cannot be decoded ({len(data)} bytes): {error}") from error


def _opened(data: bytes) -> Image.Image:
    """Open a picture in a supported format; Pillow passes others to programs (EPS) or plugins."""
    return Image.open(BytesIO(data), formats=FORMATS)


def _check_header(image: Image.Image, most_pixels: int) -> None:
    width, height = image.size
    if width * height > most_pixels:
        raise ValueError(f"it has {width} x {height} pixels; the limit is {most_pixels} (data.max_picture_pixels)")
    if image.mode.startswith(WIDE_MODES):
        raise ValueError(
            f"it is gray with more than 8 bits per pixel (Pillow's mode {image.mode}), which would become white or "
            "black: convert it to 8 bits"
        )


def _upright(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)
    # convert() would copy a picture that is already RGB.
    return image if image.mode == "RGB" else image.convert("RGB")


def is_plain_jpeg(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> bool:
    """Return whether a picture is a JPEG that does not need Pillow, from its segments: RGB, upright and not too
    large."""
    offset, is_plain = len(START), False
    while data.startswith(START) and len(data) >= offset + SEGMENT.size + FRAME.size:
        marker, length = SEGMENT.unpack_from(data, offset)
        if marker in FRAMES:
            bits, height, width, components = FRAME.unpack_from(data, offset + SEGMENT.size)
            is_plain = (
                bits == 8 and components == 3 and 0 < height * width <= min(most_pixels, Image.MAX_IMAGE_PIXELS or 0)
            )
        elif marker not in PLAIN_SEGMENTS:
            return is_plain and marker == SCAN
        offset += 2 + length
    return False


def _is_usual_jpeg(image: Image.Image) -> bool:
    """Decide from the header; EXIF is only read if there is some."""
    if image.format != "JPEG" or image.mode != "RGB":
        return False
    return "exif" not in image.info or image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def _torchvision_decodes_alike() -> bool:
    """Return whether torchvision decodes like Pillow: it may be built without libjpeg, or with another version."""
    for subsampling, progressive in ((0, False), (2, False), (2, True)):
        buffer = BytesIO()
        noise(83, 61).save(buffer, "JPEG", quality=85, subsampling=subsampling, progressive=progressive)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        try:
            pixels = decode_jpeg(data, mode=ImageReadMode.RGB)
        except RuntimeError:
            return False
        if not torch.equal(pixels, F.pil_to_tensor(Image.open(buffer))):
            return False
    return True


def noise(width: int, height: int) -> Image.Image:
    """Return a picture with all byte values, to test a decoder or processor with."""
    return Image.effect_noise((width, height), 200).convert("RGB")


TORCHVISION_DECODES_ALIKE = _torchvision_decodes_alike()
