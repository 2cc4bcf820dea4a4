"""Images: bytes -> pixels. `image_header` reads their size alone."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from io import BytesIO

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.processors.image_header import (
    ImageHeader,
    check_header,
    open_image,
    orientation_of,
    ratio_problem,
    reporting_damage,
)
from llava_mcore.data.processors.video_frames import frame_chunks

SEGMENT, FRAME = struct.Struct(">HH"), struct.Struct(">BHHB")
"""Headers in a JPEG: marker and length of a segment; bits, height, width and components of a frame."""
START, FRAMES, SCAN = b"\xff\xd8", (0xFFC0, 0xFFC2), 0xFFDA
PLAIN_SEGMENTS = (0xFFE0, 0xFFFE, 0xFFDB, 0xFFC4, 0xFFDD)
"""JFIF, comment, and tables. EXIF and XMP may rotate the image, and Adobe's segment may define other colors."""

ToRgb = Callable[[Image.Image], Image.Image]
"""Makes a decoded image RGB, and decides what is seen where it is transparent."""


def on_white(image: Image.Image) -> Image.Image:
    """Return an image as RGB on a white background, as vLLM and qwen-vl-utils show transparent ones.

    transformers' `load_image` would drop the transparency, which uncovers colors that nobody has seen.
    """
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    # convert() would copy an image that is already RGB.
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_image(data: bytes, most_pixels: int = LIMITS.image_pixels, to_rgb: ToRgb = on_white) -> Image.Image:
    """Decode one image to RGB, rotated by its EXIF or XMP, as transformers loads an image.

    Raises DataError if the bytes are not a complete image, or one that cannot be used (see `check_header`).
    """
    with reporting_damage(data):
        return to_rgb(_upright(_checked(data, most_pixels)))


def decode_pixels(data: bytes, most_pixels: int = LIMITS.image_pixels, to_rgb: ToRgb = on_white) -> Tensor:
    """Like `decode_image`, but return uint8 [3, h, w].

    Torchvision decodes common JPEGs: with the same library and bitwise the same result as Pillow, but a third faster,
    because the pixels are not copied.
    """
    with reporting_damage(data):
        image = None
        # Pillow's own parsing of the header takes longer than everything else around decoding.
        is_usual = TORCHVISION_DECODES_ALIKE and is_plain_jpeg(data, most_pixels)
        if not is_usual:
            image = _checked(data, most_pixels)
            is_usual = TORCHVISION_DECODES_ALIKE and _is_usual_jpeg(image)
        if is_usual:
            # If it fails, Pillow may decode the image, or raises the reason.
            with contextlib.suppress(RuntimeError):
                return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        return F.pil_to_tensor(to_rgb(_upright(image or open_image(data))))


def decode_frames(frames: Sequence[bytes], most_pixels: int = LIMITS.image_pixels, to_rgb: ToRgb = on_white) -> Tensor:
    """Return the frames of a video as uint8 [frames, 3, h, w]. DataError like `decode_image`, and for several sizes."""
    (pixels,) = frame_chunks(frames, lambda frame: decode_pixels(frame, most_pixels, to_rgb), None)
    return pixels


def _checked(data: bytes, most_pixels: int) -> Image.Image:
    """Open an image. ValueError for one that cannot be used."""
    image = open_image(data)
    # No limit depends on which of the sides is the height.
    check_header(ImageHeader(str(image.format), image.mode, (image.height, image.width)), most_pixels)
    return image


def _upright(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)
    return image


def is_plain_jpeg(data: bytes, most_pixels: int = LIMITS.image_pixels) -> bool:
    """Return whether an image is a JPEG that does not need Pillow, from its segments: RGB, upright and of an allowed
    size."""
    offset, is_plain = len(START), False
    while data.startswith(START) and len(data) >= offset + SEGMENT.size + FRAME.size:
        marker, length = SEGMENT.unpack_from(data, offset)
        if marker in FRAMES:
            bits, height, width, components = FRAME.unpack_from(data, offset + SEGMENT.size)
            largest = min(most_pixels, Image.MAX_IMAGE_PIXELS or 0)
            is_allowed = 0 < height * width <= largest and ratio_problem((height, width)) is None
            is_plain = bits == 8 and components == 3 and is_allowed
        elif marker not in PLAIN_SEGMENTS:
            return is_plain and marker == SCAN
        offset += 2 + length
    return False


def _is_usual_jpeg(image: Image.Image) -> bool:
    """Decide from the header; its metadata are only parsed if there are some."""
    if image.format != "JPEG" or image.mode != "RGB":
        return False
    return not {"exif", "xmp"} & image.info.keys() or orientation_of(image) == 1


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
    """Return an image with all byte values, to test a decoder or processor with."""
    return Image.effect_noise((width, height), 200).convert("RGB")


TORCHVISION_DECODES_ALIKE = _torchvision_decodes_alike()
