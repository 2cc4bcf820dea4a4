"""Samples with one fault each: images, the json and its conversation, marks and images, packs, the older form."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.helpers.bad_data_makers import (
    ANSWERED,
    ASKED,
    CRUDE,
    GOOD,
    VQA,
    BadData,
    Parts,
    messages,
    one_sample,
    picture,
    pictured,
    said,
)

# -- single images -------------------------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes, *, checksum: int | None = None) -> bytes:
    """One chunk of a PNG, with the right checksum unless another is given."""
    check = zlib.crc32(name + data) if checksum is None else checksum
    return len(data).to_bytes(4, "big") + name + data + check.to_bytes(4, "big")


def png(
    width: int = 4, height: int = 4, *, data: bytes | None = None, head: int | None = None, body: int | None = None
) -> bytes:
    """A black PNG; data: its compressed pixels; head, body: other checksums of the header and of the pixels."""
    start = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    pixels = zlib.compress(bytes(height * (3 * width + 1))) if data is None else data
    chunks = chunk(b"IHDR", start, checksum=head) + chunk(b"IDAT", pixels, checksum=body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def rotated() -> bytes:
    """A JPEG that its EXIF turns by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return picture(exif=exif)


def animated() -> bytes:
    """A GIF of two frames."""
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


UNDECODABLE = "the image cannot be decoded"
PICTURES = [
    BadData("cut jpg", pictured(picture()[:-100]), "skip", rf"{UNDECODABLE} .*truncated"),
    BadData("empty jpg", pictured(b""), "skip", rf"{UNDECODABLE} \(0 bytes\): no known format"),
    BadData("web page as jpg", pictured(b"<html>404</html>"), "skip", f"{UNDECODABLE} .*no known format"),
    BadData("only a jpg's first bytes", pictured(picture()[:20]), "skip", UNDECODABLE),
    BadData("png, header's checksum wrong", pictured(png(head=1), "0.png"), "skip", f"{UNDECODABLE} .*no known"),
    BadData("png with damaged pixels", pictured(png(data=b"damaged"), "0.png"), "skip", f"{UNDECODABLE}.*data stream"),
    BadData("cut png", pictured(picture("PNG", size=(300, 300))[:-200], "0.png"), "skip", UNDECODABLE),
    BadData("drawing (svg) as png", pictured(b"<svg xmlns='x'/>", "0.png"), "skip", f"{UNDECODABLE} .*no known format"),
    BadData("decompression bomb", pictured(png(30_000, 30_000, data=b""), "0.png"), "skip", "pixels"),
    BadData("image of no size", pictured(png(0, 10), "0.png"), "skip", UNDECODABLE),
    BadData("unknown image part", pictured(picture(), "0.heic"), "skip", "1 <image> in the conv.*, but 0 images"),
    BadData("16-bit png", pictured(picture("PNG", "I;16"), "0.png"), "skip", f"{UNDECODABLE} .*convert it to 8 bits"),
    BadData("png, pixels' checksum wrong", pictured(png(body=1), "0.png"), "fine"),
    BadData("gif of one pixel", pictured(picture("GIF", size=(1, 1)), "0.gif"), "fine"),
    BadData("animated gif", pictured(animated(), "0.gif"), "fine"),
    BadData("cmyk jpg", pictured(picture(mode="CMYK")), "fine"),
    BadData("gray jpg", pictured(picture(mode="L")), "fine"),
    BadData("png with transparency", pictured(picture("PNG", "RGBA"), "0.png"), "fine"),
    BadData("png with a palette", pictured(picture("PNG", "P"), "0.png"), "fine"),
    BadData("jpg turned by exif", pictured(rotated()), "fine"),
    BadData("image of one row", pictured(picture(size=(199, 1))), "fine"),
    BadData("narrow image", pictured(picture(size=(300, 1))), "skip", "the longer side may be at most 200 times"),
    BadData("part in capitals", pictured(picture(), "0.JPG"), "fine"),
    BadData("png called jpg", pictured(picture("PNG")), "fine"),
]

# -- the json and its conversation -----------------------------------------------------------------------------------

NO_TEXT = r'message 0 must have a "role" and a text as "content"'
JSONS = [
    BadData("no json", one_sample({"json": None}), "skip", r"a part \.json with an object is needed, found nothing"),
    BadData("json no json", one_sample({"json": "{'a': 1}"}), "skip", "part 'json' cannot be decoded"),
    BadData("json empty", one_sample({"json": ""}), "skip", "part 'json' cannot be decoded"),
    BadData("json cut", one_sample({"json": '{"messages": [{"ro'}), "skip", "part 'json' cannot be decoded"),
    BadData("json not utf-8", one_sample({"json": b'{"messages": "\xfa"}'}), "skip", "part 'json' cannot be decoded"),
    BadData("json a list", one_sample({"json": [1, 2]}), "skip", "with an object is needed, found list"),
    BadData("json without messages", one_sample({"json": {"id": 7}}), "skip", "must have one of .*found .*id"),
    BadData(
        "messages and question",
        one_sample({"json": messages(ASKED, ANSWERED) | {"question": "?"}}),
        "skip",
        "must have one of .*found .*messages.*question",
    ),
    BadData("messages empty", said(images=1), "skip", '"messages" must be a non-empty list'),
    BadData(
        "messages a text",
        one_sample({"json": {"messages": "hi"}}),
        "skip",
        "non-empty list, found str",
    ),
    BadData("message a text", one_sample({"json": {"messages": ["hi"]}}), "skip", NO_TEXT),
    BadData("content null", said(("user", None), ANSWERED), "skip", NO_TEXT),
    BadData("content a number", said(("user", 3), ANSWERED), "skip", NO_TEXT),
    BadData("content in parts", said(("user", [{"type": "text", "text": "a"}]), ANSWERED), "skip", NO_TEXT),
    BadData("unknown role", said(("narrator", "Hi"), ANSWERED), "skip", "the role is 'narrator'; allowed: system"),
    BadData("no role", one_sample({"json": {"messages": [{"content": "a"}]}}), "skip", "the role is None"),
    BadData("no answer", said(ASKED, images=1), "skip", "an answer is needed"),
    BadData("only a system message", said(("system", "Be brief.")), "skip", "an answer is needed"),
    BadData("two questions", said(("user", "Hi"), ("user", "So?"), ANSWERED), "skip", "must take turns"),
    BadData("two answers", said(("user", "Hi"), ANSWERED, ANSWERED), "skip", "must take turns"),
    BadData("answer first", said(ANSWERED, ("user", "Hi")), "skip", "must take turns, the user first"),
    BadData(
        "system message later",
        said(("user", "Hi"), ANSWERED, ("system", "Be brief."), ("user", "So?"), ANSWERED),
        "skip",
        "a system message only at the beginning",
    ),
    BadData("empty answer", said(("user", "Hi"), ("assistant", "")), "skip", "message 1: the answer is empty"),
    BadData("blank answer", said(("user", "Hi"), ("assistant", " \n\t")), "skip", "message 1: the answer is empty"),
    BadData(
        "empty second answer",
        said(("user", "Hi"), ANSWERED, ("user", "So?"), ("assistant", "")),
        "skip",
        "message 3: the answer is empty",
    ),
    BadData("byte order mark", one_sample({"json": b"\xef\xbb\xbf" + json.dumps(GOOD["json"]).encode()}), "fine"),
    BadData("question open at the end", said(("user", "Hi"), ANSWERED, ("user", "So?")), "fine"),
    BadData(
        "too long", said(("user", "why? " * 60), ANSWERED), "skip", r"the sample has \d+ tokens .*seq_length is 64"
    ),
    BadData(
        "another tokenizer's count",
        one_sample({"json": messages(ASKED, ANSWERED) | {"num_tokens": 7}}),
        "fine",
        "another token count than when it was prepared",
    ),
]

# -- marks and images, packs, the older form -----------------------------------------------------------------------

OLD: Parts = {"jpg": picture(), "json": {"question": "What is this?"}, "txt": "A gray ramp."}
LONG = messages(("user", "why? " * 5), ANSWERED)
TWO = messages(("user", "<image> or <image>?"), ("assistant", "no"))


CLIP = messages(("user", "<video>What is this?"), ANSWERED)
FILM: Parts = {"json": CLIP | {"videos": [["0.jpg"]]}, "0.jpg": picture()}


def old(parts: Parts, dataset_yaml: str = CRUDE) -> Callable[[Path], Path]:
    return one_sample(parts, base=OLD, dataset_yaml=dataset_yaml)


def packed(*members: Any) -> Callable[[Path], Path]:
    return one_sample({"0.jpg": None, "json": {"pack": list(members)}})


FORMS = [
    BadData("more marks", said(("user", "<image> or <image>?"), ANSWERED, images=1), "skip", "2 <image> .*1 images"),
    BadData("fewer marks", said(ASKED, ANSWERED, images=2), "skip", "1 <image> in the conversation, but 2 images"),
    BadData("no mark", said(("user", "What?"), ANSWERED, images=1), "skip", "0 <image> .*1 images"),
    BadData("mark in the answer", said(ASKED, ("assistant", "an <image>"), images=1), "skip", "2 <image> .*1 images"),
    BadData("images without numbers", one_sample({"b.jpg": picture()}), "skip", "several images must be numbered"),
    BadData("number twice", one_sample({"0.png": picture("PNG")}), "skip", "several images must be numbered"),
    BadData("a number left out", one_sample({"json": TWO, "2.jpg": picture()}), "fine"),
    BadData(
        "video",
        one_sample(FILM),
        "skip",
        "it has a video, but LlavaForCond.* does not support videos; classes that do: ",
    ),
    BadData(
        "video mark alone", said(("user", "<video>"), ANSWERED), "fine", "its text has <video>, read as plain text"
    ),
    BadData(
        "video file", one_sample(FILM | {"json": CLIP | {"videos": ["a.mp4"]}}), "skip", "a shard holds the frames"
    ),
    BadData("video, frame missing", one_sample(FILM | {"0.jpg": None}), "skip", "there is no part '0.jpg', found"),
    BadData("pack no list", one_sample({"json": {"pack": 3}}), "skip", '"pack" must be a list', packing=True),
    BadData("pack empty", packed(), "skip", '"pack" must be a list', packing=True),
    BadData("pack with a bad member", packed({"messages": []}), "skip", "must be a non-empty list", packing=True),
    BadData("pack too long", packed(LONG, LONG), "skip", r"a pack of \d+ tokens was written", packing=True),
    BadData(
        "old form, two images",
        old({"jpg": None, "0.jpg": b"", "1.jpg": b""}),
        "skip",
        "at most one image is allowed",
    ),
    BadData("old form, no txt", old({"txt": None}), "skip", r"a part \.txt with the answer is needed"),
    BadData("old form, txt not utf-8", old({"txt": b"\xff\xfe\xfa"}), "skip", "part 'txt' cannot be decoded: 'utf-8'"),
    BadData("old form, empty txt", old({"txt": " \n"}), "skip", "the answer must be non-empty text"),
    BadData("old form, number asked", old({"json": {"question": 3}}), "skip", "the question must be non-empty text"),
    BadData("old form, two marks", old({"json": {"question": "<image> <image>?"}}), "skip", "2 <image> .*1 images"),
    BadData("vqa type, no jpg", old({"jpg": None}, VQA), "skip", "jpg"),
    BadData("vqa type, no question", old({"json": {"id": 1}}, VQA), "skip", "question"),
    BadData("vqa type, no txt", old({"txt": None}, VQA), "skip", "txt"),
    BadData("vqa type, bad json", old({"json": "{"}, VQA), "skip", "part 'json' cannot be decoded"),
]
