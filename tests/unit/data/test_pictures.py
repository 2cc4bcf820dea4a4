"""Images of every format, mode and orientation: size and pixels as transformers loads them, in every reader."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import CLIPImageProcessor, Idefics2ImageProcessor
from transformers.image_utils import load_image

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.encode.tokens import video_shape
from llava_mcore.data.processors.image_header import image_size, read_header
from llava_mcore.data.processors.image_processor import to_rgb_of
from llava_mcore.data.processors.images import decode_frames, decode_image, decode_pixels
from llava_mcore.data.samples import Video
from llava_mcore.errors import DataError
from llava_mcore.inference.answering.user_files import read_image as read_users_picture
from llava_mcore.prepare.media.images import inspect, read_image
from llava_mcore.prepare.media.item_options import Resizing
from llava_mcore.prepare.row_types import BadSample, Reason

WIDTH, HEIGHT = 11, 6
ORIENTATION = 0x0112


def pixels_of(mode: str) -> Image.Image:
    """An image with colors of all kinds, and with all degrees of transparency if the mode has them."""
    random = np.random.default_rng(7)
    bands = {"RGBA": 4, "LA": 2, "RGB": 3, "CMYK": 4, "L": 1}.get(mode, 3)
    values = random.integers(0, 256, (HEIGHT, WIDTH, bands), dtype=np.uint8)
    if bands == 1:
        return Image.fromarray(values[..., 0])
    image = Image.merge(
        mode if mode in ("RGBA", "LA", "RGB", "CMYK") else "RGB",
        [Image.fromarray(x) for x in np.moveaxis(values, -1, 0)],
    )
    return image if image.mode == mode else image.convert(mode)


def encoded(kind: str, mode: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pixels_of(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation: int | None) -> bytes:
    tags = Image.Exif()
    tags[0x010F] = "maker"
    if orientation is not None:
        tags[ORIENTATION] = orientation
    return tags.tobytes()


def xmp(orientation: int, *, as_element: bool = False) -> bytes:
    """What photo programs write."""
    value = f"<tiff:Orientation>{orientation}</tiff:Orientation>" if as_element else ""
    attribute = "" if as_element else f' tiff:Orientation="{orientation}"'
    description = f"<rdf:Description{attribute}>{value}</rdf:Description>"
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/">{description}</x:xmpmeta>'.encode()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_with(png: bytes, extra: bytes, *, late: bool) -> bytes:
    """A PNG with more chunks before or after its pixels."""
    place = png.index(b"IEND" if late else b"IDAT") - 4
    return png[:place] + extra + png[place:]


def raw_profile(orientation: int) -> tuple[bytes, bytes]:
    """EXIF as ImageMagick writes it."""
    data = exif(orientation)
    return b"Raw profile type exif\0", f"\nexif\n{len(data):8}\n{data.hex()}\n".encode()


def png_chunks(orientation: int) -> dict[str, bytes]:
    keyword, profile = raw_profile(orientation)
    return {
        "eXIf": chunk(b"eXIf", exif(orientation).removeprefix(b"Exif\0\0")),
        "iTXt": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(orientation)),
        "compressed iTXt": chunk(
            b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(orientation, as_element=True))
        ),
        "tEXt": chunk(b"tEXt", keyword + profile),
        "zTXt": chunk(b"zTXt", keyword + b"\0" + zlib.compress(profile)),
    }


def pictures() -> dict[str, bytes]:
    """Name -> an image."""
    tiff = {"LZW TIFF": {"compression": "tiff_lzw"}, "TIFF": {}}
    modes = {
        "JPEG": ("L", "RGB", "CMYK"),
        "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
        "WEBP": ("RGB", "RGBA"),
        "TIFF": ("L", "RGB", "RGBA", "CMYK"),
        "GIF": ("P", "L"),
        "BMP": ("RGB", "L", "RGBA"),
        "PPM": ("RGB", "L"),
    }
    result = {f"{kind} {mode}": encoded(kind, mode) for kind, some in modes.items() for mode in some}
    for mode, transparency in {"P": 3, "L": 90, "RGB": (10, 20, 30)}.items():
        result[f"PNG {mode} with a transparent color"] = encoded("PNG", mode, transparency=transparency)
    result["PNG P with transparent colors"] = encoded("PNG", "P", transparency=bytes(range(0, 250, 10)))
    result["GIF with a transparent color"] = encoded("GIF", "P", transparency=5)
    for turn in (2, 3, 5, 6, 7, 8):
        for kind in ("JPEG", "PNG", "WEBP"):
            result[f"{kind} EXIF {turn}"] = encoded(kind, "RGB", exif=exif(turn))
        result[f"MPO EXIF {turn}"] = encoded(
            "MPO", "RGB", exif=exif(turn), save_all=True, append_images=[pixels_of("RGB")]
        )
        for name, options in tiff.items():
            result[f"{name} tag {turn}"] = encoded("TIFF", "RGB", tiffinfo={ORIENTATION: turn}, **options)
    for name, options in {"JPEG": {}, "WEBP": {}, **tiff}.items():
        kind = name.split()[-1]
        for as_element in (False, True):
            info = xmp(6, as_element=as_element)
            metadata: Any = {"tiffinfo": {700: info}} if kind == "TIFF" else {"xmp": info}
            result[f"{name} XMP {as_element}"] = encoded(kind, "RGB", **metadata, **options)
    result["JPEG EXIF without orientation, XMP"] = encoded("JPEG", "RGB", exif=exif(None), xmp=xmp(8))
    result["JPEG EXIF 3, XMP 6"] = encoded("JPEG", "RGB", exif=exif(3), xmp=xmp(6))
    result["TIFF tag 3, XMP 6"] = encoded("TIFF", "RGB", tiffinfo={ORIENTATION: 3, 700: xmp(6)})
    result["TIFF tag 6, XMP 3"] = encoded("TIFF", "RGB", tiffinfo={ORIENTATION: 6, 700: xmp(3)})
    for (name, extra), late, mode in itertools.product(png_chunks(6).items(), (False, True), ("RGB", "RGBA")):
        result[f"PNG {mode} {name} {'after' if late else 'before'} the pixels"] = png_with(
            encoded("PNG", mode), extra, late=late
        )
    both = png_with(encoded("PNG", "L"), chunk(b"tEXt", b"date:create\0today") + png_chunks(3)["eXIf"], late=True)
    result["PNG with two orientations"] = png_with(both, png_chunks(6)["iTXt"], late=False)
    return result


PICTURES = pictures()


def expected(data: bytes) -> Image.Image:
    """The image as transformers loads it, on white if it is transparent."""
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if not upright.has_transparency_data:
        return load_image(Image.open(io.BytesIO(data)))
    layers = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layers.size, (255, 255, 255, 255)), layers).convert("RGB")


@pytest.mark.parametrize("name", PICTURES)
def test_every_reader_sees_what_transformers_loads(name: str, tmp_path: Path) -> None:
    data = PICTURES[name]
    image = expected(data)
    pixels, size = pil_to_tensor(image), (image.height, image.width)
    assert torch.equal(pil_to_tensor(decode_image(data)), pixels)
    assert torch.equal(decode_pixels(data), pixels)
    assert image_size(data) == size
    assert inspect(data)[1] == image.size
    assert torch.equal(decode_frames([data, data])[1], pixels)
    assert video_shape(Video((data,)))[1:3] == size
    (tmp_path / "picture").write_bytes(data)
    assert read_users_picture(tmp_path / "picture", LIMITS) == data


def test_the_matrix_has_transparent_and_turned_pictures() -> None:
    """Otherwise the comparison would say little."""
    plain = [name for name, data in PICTURES.items() if load_image(Image.open(io.BytesIO(data))) == expected(data)]
    assert len(PICTURES) - len(plain) > 8
    assert sum(read_header(data).size == (WIDTH, HEIGHT) for data in PICTURES.values()) > 40


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
@pytest.mark.parametrize("size", [(600, 1), (1, 201), (20_000, 99)])
def test_narrow_pictures_are_refused_before_they_are_enlarged(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    """CLIP's processor would make 203 MB of 600 x 1 pixels, which are a file of 79 bytes."""
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, kind)
    data, problem = buffer.getvalue(), f"{size[0]} x {size[1]} pixels: the longer side may be at most 200 times"
    (tmp_path / "picture").write_bytes(data)
    for read in (
        decode_image,
        decode_pixels,
        image_size,
        lambda data: decode_frames([data]),
        lambda _: read_users_picture(tmp_path / "picture", LIMITS),
    ):
        with pytest.raises(DataError, match=problem):
            read(data)
    with pytest.raises(BadSample, match=problem) as refused:
        read_image(data, tmp_path)
    assert refused.value.reason == Reason.SHAPE


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"resized_height": 60, "resized_width": 100}, (112, 56)),
        ({"max_pixels": 28 * 28 * 6}, (84, 28)),
        ({"min_pixels": 28 * 28 * 9, "max_pixels": 28 * 28 * 40}, (140, 84)),
        ({"detail": "auto"}, (110, 60)),
    ],
)
def test_sizes_of_one_picture(options: dict[str, Any], size: tuple[int, int], tmp_path: Path) -> None:
    """As qwen-vl-utils resizes it, to multiples of 28; after that the class's processor has nothing to do."""
    image = Image.effect_noise((60, 110), 90).convert("RGB").transpose(Image.Transpose.ROTATE_90)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    result = read_image({"bytes": buffer.getvalue(), **options}, tmp_path, resizing=Resizing(28))
    assert result.size == size and result.extension == "png"
    assert decode_image(result.data).tobytes() == image.resize(size, Image.Resampling.BICUBIC).tobytes()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"resized_height": 60}, "one of them is missing"),
        ({"max_pixels": "60"}, "max_pixels is '60': not a whole number above 0"),
        ({"min_pixels": 99999, "max_pixels": 99}, "at least 99999 and at most 99 pixels"),
        ({"min_pixels": 10**12, "max_pixels": 10**13}, r"resized to .*; the limit is 178956970 \(--max-image-pixels"),
        ({"detail": "low"}, "detail is 'low': only auto and high are supported"),
        ({"resized_height": 1, "resized_width": 300}, "aspect ratio"),
    ],
)
def test_sizes_that_cannot_be_honored(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    reference = {"bytes": encoded("PNG", "RGB"), **options}
    with pytest.raises(BadSample, match=problem):
        read_image(reference, tmp_path, resizing=Resizing(28))
    if "pixels" in str(options):
        with pytest.raises(BadSample, match=r"--tokenizer-load-dir|not a whole number"):
            read_image(reference, tmp_path)


def test_pictures_of_most_proportions_are_taken() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (800, 4)).save(buffer, "JPEG")
    assert image_size(buffer.getvalue()) == tuple(decode_pixels(buffer.getvalue()).shape[1:]) == (4, 800)


def test_pictures_that_training_refuses_are_refused_by_prepare(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("I;16", (9, 9)).save(buffer, "PNG")
    for data, problem in {
        buffer.getvalue(): "more than 8 bits per pixel",
        b"\0\0\0\x18ftypheic": "no known format, it seems to be HEIC; supported: jpg",
        b'<?xml version="1.0"?><svg/>': "it seems to be SVG",
    }.items():
        with pytest.raises(DataError, match=problem):
            decode_image(data)
        with pytest.raises(BadSample, match=problem) as refused:
            inspect(data)
        assert refused.value.reason == Reason.IMAGE_FORMAT


@pytest.mark.parametrize("name", PICTURES)
def test_a_processor_of_its_own_decides_about_transparency(name: str) -> None:
    data = PICTURES[name]
    processor = Idefics2ImageProcessor()
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    theirs = pil_to_tensor(processor.convert_to_rgb(upright))
    assert torch.equal(decode_pixels(data, to_rgb=to_rgb_of(processor)), theirs)
    assert torch.equal(decode_pixels(data, to_rgb=to_rgb_of(CLIPImageProcessor())), pil_to_tensor(expected(data)))
