"""Pictures: bytes -> what the checkpoint's own image processor makes of them, and how many tokens that is."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F
from transformers import AutoImageProcessor, BaseImageProcessor
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.auto.image_processing_auto import DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.samples import MediaSpan
from llava_mcore.errors import DataError
from llava_mcore.models.media import MediaPlan, MediaTokens
from llava_mcore.pixels import NO_SCALE, normalise

# Pillow would warn of pictures that max_picture_pixels allows.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
SEGMENT, FRAME = struct.Struct(">HH"), struct.Struct(">BHHB")
"""Of a JPEG: marker and length of a segment; bits, height, width and components of a frame."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
"""Pillow's names of what samples.IMAGE_PARTS calls by file endings; JPEG opens MPO as well."""
START, FRAMES, SCAN = b"\xff\xd8", (0xFFC0, 0xFFC2), 0xFFDA
PLAIN_SEGMENTS = (0xFFE0, 0xFFFE, 0xFFDB, 0xFFC4, 0xFFDD)
"""JFIF, comment, and tables. EXIF may turn the picture, and Adobe's segment names other colours."""

SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that exchange height and width."""

DAMAGED = (
    *(ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError),
    *(EOFError, struct.error, Image.DecompressionBombError),
)
"""What Pillow raises for bytes that make no sense to it: a damaged PNG is a SyntaxError, a mistyped EXIF tag a
TypeError. Energon would take some of them for a fault of the program, others for one of the whole pack."""


def decode_image(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> Image.Image:
    """Decode one picture to RGB, turned upright by its EXIF, exactly as transformers loads a user's picture.

    Raises DataError if the bytes are no whole picture.
    """
    with _decoding(data):
        image = _opened(data)
        _check_size(image, most_pixels)
        return _upright(image)


def decode_pixels(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> Tensor:
    """As `decode_image`, but return uint8 [3, h, w].

    Torchvision decodes the usual JPEGs: with the same library and the same bits as Pillow, but a third faster, since
    the pixels need not be copied out of it.
    """
    with _decoding(data):
        image = None
        # Pillow's own look at the header takes longer than all else around decoding.
        is_usual = TORCHVISION_DECODES_ALIKE and is_plain_jpeg(data, most_pixels)
        if not is_usual:
            image = _opened(data)
            _check_size(image, most_pixels)
            is_usual = TORCHVISION_DECODES_ALIKE and _is_usual_jpeg(image)
        if is_usual:
            # What it cannot decode, Pillow may, or says why not.
            with contextlib.suppress(RuntimeError):
                return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
        return F.pil_to_tensor(_upright(image or _opened(data)))


def picture_size(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> tuple[int, int]:
    """Return height and width of a picture as `decode_image` returns it, from its header.

    Raises DataError if the bytes are no picture.
    """
    with _decoding(data):
        image = _opened(data)
        _check_size(image, most_pixels)
        width, height = image.size
        return (width, height) if orientation_of(image, data) in SIDEWAYS else (height, width)


def orientation_of(image: Image.Image, data: bytes) -> int | None:
    """Return the EXIF orientation that is still to be applied to an opened picture, without decoding it in vain."""
    if image.format == "TIFF":
        return None  # Pillow turns it while loading and already gives the upright size
    if image.format == "PNG":
        # For a PNG without EXIF before its pixels, Pillow would decode them in search of one behind them.
        if b"eXIf" in data:
            image.load()
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    return image.getexif().get(ExifTags.Base.Orientation)


@contextlib.contextmanager
def _decoding(data: bytes) -> Iterator[None]:
    """Report what is wrong with a picture as DataError."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise DataError(f"the picture cannot be decoded ({len(data)} bytes): no known format") from error
    except DAMAGED as error:
        raise DataError(f"the picture cannot be decoded ({len(data)} bytes): {error}") from error


def _opened(data: bytes) -> Image.Image:
    """Open a picture in one of the formats that may be trained on; Pillow hands others to programs (EPS) or plugins."""
    return Image.open(BytesIO(data), formats=FORMATS)


def _check_size(image: Image.Image, most_pixels: int) -> None:
    width, height = image.size
    if width * height > most_pixels:
        raise ValueError(f"it has {width} x {height} pixels, allowed are {most_pixels} (data.max_picture_pixels)")


def _upright(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)
    # convert() would copy what is RGB already.
    return image if image.mode == "RGB" else image.convert("RGB")


def is_plain_jpeg(data: bytes, most_pixels: int = LIMITS.picture_pixels) -> bool:
    """Tell from its segments that a picture is a JPEG which needs no look by Pillow: RGB, upright and not too large."""
    place, is_plain = len(START), False
    while data.startswith(START) and len(data) >= place + SEGMENT.size + FRAME.size:
        marker, length = SEGMENT.unpack_from(data, place)
        if marker in FRAMES:
            bits, height, width, components = FRAME.unpack_from(data, place + SEGMENT.size)
            is_plain = (
                bits == 8 and components == 3 and 0 < height * width <= min(most_pixels, Image.MAX_IMAGE_PIXELS or 0)
            )
        elif marker not in PLAIN_SEGMENTS:
            return is_plain and marker == SCAN
        place += 2 + length
    return False


def _is_usual_jpeg(image: Image.Image) -> bool:
    """Tell from the header; EXIF is only read where there is some."""
    if image.format != "JPEG" or image.mode != "RGB":
        return False
    return "exif" not in image.info or image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def _torchvision_decodes_alike() -> bool:
    """Torchvision may be built without libjpeg, or with another one than Pillow."""
    for subsampling, progressive in ((0, False), (2, False), (2, True)):
        buffer = BytesIO()
        _probe(83, 61).save(buffer, "JPEG", quality=85, subsampling=subsampling, progressive=progressive)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        try:
            pixels = decode_jpeg(data, mode=ImageReadMode.RGB)
        except RuntimeError:
            return False
        if not torch.equal(pixels, F.pil_to_tensor(Image.open(buffer))):
            return False
    return True


def _probe(width: int, height: int) -> Image.Image:
    """A picture with all values of a byte in it."""
    return Image.effect_noise((width, height), 200).convert("RGB")


TORCHVISION_DECODES_ALIKE = _torchvision_decodes_alike()


class ImagePreprocessor:
    """The checkpoint's image processor: pictures as bytes -> tiles of one fixed square size.

    Rescaling and normalising are left to the device (`llava_mcore.pixels`) where that gives the same bits: it is two
    thirds of the processor's time, and makes four times as much to hand over between processes.
    """

    def __init__(
        self,
        processor: BaseImageProcessor,
        image_size: int,
        plan: MediaPlan,
        most_pixels: int = LIMITS.picture_pixels,
    ) -> None:
        """Check the processor on a wide picture; DataError if the result is not what the vision tower takes."""
        self.most_pixels = most_pixels
        self.processor = processor
        self.image_size = image_size
        self.plan = plan
        self.pixel_scale = NO_SCALE
        probe = _probe(image_size + 17, image_size // 2 + 5)
        expected = self._process([probe])
        found = tuple(expected.shape[1:])
        if found != (3, image_size, image_size):
            raise DataError(
                f"the image processor makes pictures of {' x '.join(map(str, found))}, but the vision tower takes "
                f"3 x {image_size} x {image_size}; correct size and crop_size in the processor's configuration"
            )
        if processor.do_rescale and processor.do_normalize:
            self.pixel_scale = torch.tensor([processor.image_mean, processor.image_std]) * (
                1.0 / processor.rescale_factor
            )
            pixels = self._process([probe])
            if pixels.dtype != torch.uint8 or not torch.equal(normalise(pixels, self.pixel_scale), expected):
                self.pixel_scale = NO_SCALE
        self._is_plain = not plan.any_size and bool(len(self.pixel_scale)) and self._resizes_and_crops_only()

    @property
    def num_bytes(self) -> int:
        """Of a tile's pixels."""
        return 3 * self.image_size**2 * (1 if len(self.pixel_scale) else 4)

    def _process(self, images: Sequence[Image.Image], tokens: Sequence[MediaTokens] = ()) -> Tensor:
        """`tokens`: those that the pictures have in their conversation; else as if each were alone in one."""
        leave_out = {"do_rescale": False, "do_normalize": False} if len(self.pixel_scale) else {}
        tokens = tokens or [self.plan.tokens([(image.height, image.width)])[0] for image in images]
        pixels = self.plan.pixels(self.processor, images, tokens, **leave_out)
        num_tiles = sum(item.num_tiles for item in tokens)
        if len(pixels) != num_tiles:
            raise DataError(f"the image processor makes {len(pixels)} tiles of what the model takes as {num_tiles}")
        return pixels

    def _resizes_and_crops_only(self) -> bool:
        """Tell whether the processor's two steps give what all of it gives, for pictures of every proportion."""
        side = self.image_size
        sizes = [(side + 17, side // 2 + 5), (side // 2 + 5, 2 * side + 1), (side, side), (side // 3 + 1, side // 3)]
        probes = [_probe(*size) for size in sizes]
        return all(
            torch.equal(self._resize_and_crop(F.pil_to_tensor(probe)), self._process([probe])[0]) for probe in probes
        )

    def _resize_and_crop(self, pixels: Tensor) -> Tensor:
        """What `_process` does without rescaling, spared the checks of its arguments: they take half as long."""
        if self.processor.do_resize:
            pixels = self.processor.resize(pixels, self.processor.size, resample=self.processor.resample)
        if self.processor.do_center_crop:
            pixels = self.processor.center_crop(pixels, self.processor.crop_size)
        return pixels

    def tiles(self, media: Sequence[MediaSpan]) -> Tensor:
        """Return the tiles of one conversation's pictures, [tiles, 3, h, w]; there may be none.

        uint8 that `pixel_scale` normalises, or float32 where that is empty. The channels of a pixel may be next to each
        other in memory (channels_last), as decoders and resizing like it.

        Raises:
            DataError: a picture that cannot be decoded, or of which the processor makes another number of tiles.
        """
        data = [item.data for item in media]
        if data and not self._is_plain:
            images = [decode_image(picture, self.most_pixels) for picture in data]
            return self._process(images, [item.tokens for item in media])
        if len(data) == 1:  # a batch of such samples is copied together
            return self._resize_and_crop(decode_pixels(data[0], self.most_pixels))[None]
        shape = (len(data), 3, self.image_size, self.image_size)
        dtype = torch.uint8 if len(self.pixel_scale) else torch.float32
        pixels = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
        for tile, picture in zip(pixels, data, strict=True):
            tile.copy_(self._resize_and_crop(decode_pixels(picture, self.most_pixels)))
        return pixels


def load_image_processor(folder: Path) -> BaseImageProcessor:
    """Load the processor, backed by torchvision whatever the folder names.

    The Pillow-backed classes differ from it by up to 0.015 a value, so the choice is not left to what is installed,
    but for those that transformers backs by Pillow itself: torchvision before 0.27 has not their Lanczos filter.
    Raises OSError or ValueError if the folder has none, DataError without torchvision.
    """
    processor = _image_processor(folder, "torchvision")
    if not isinstance(processor, TorchvisionBackend):
        raise DataError(f"{type(processor).__name__} is not backed by torchvision; install torchvision")
    if type(processor).__name__ in DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS:
        return _image_processor(folder, "pil")
    return processor


def _image_processor(folder: Path, backend: str) -> BaseImageProcessor:
    return AutoImageProcessor.from_pretrained(folder, backend=backend, local_files_only=True, trust_remote_code=False)
