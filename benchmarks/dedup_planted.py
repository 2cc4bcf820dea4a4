"""Precision and recall of `dedup` on drawings among which duplicates were planted.

    apt-get install openclipart-png fonts-noto-color-emoji
    python -m benchmarks.dedup_planted --out found --json out.json

Of some images of each package there are copies: resized, compressed as JPEG, both, with other colors, with a few
words of the text changed, and with another question. All other samples have the same text, so that images alone
decide. A pair that was found is right if both are copies of one image; files with equal pixels, of which the clip art
has some, are one. The other pairs are written to `--out` to be looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont, ImageOps
from rich.console import Console
from rich.table import Table

from benchmarks.material import Sample, write_shards
from llava_mcore.cli.dedup import main as dedup
from llava_mcore.dedup.report import LIST

CLIP_ART = Path("/usr/share/openclipart/png")
EMOJI = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_SIZE, CANVAS = 109, 144
"""The only size that the font has, and the pixels of an image."""
LARGEST = 640
"""Pixels of the longer side of the clip art; some has thousands."""
MAX_BYTES, MAX_PIXELS = 300_000, 4_000_000
"""Files of the clip art that are larger are left out: they take most of the time."""
LINES = "stars"
"""A folder of the clip art that is left out: stars of hundreds of one-pixel lines, whose patterns resizing changes, and
which differ from each other less than that."""
FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
QUESTION, ANSWER = "<image>\nWhat is in the image?", "A drawing."
OTHER_QUESTION, OTHER_ANSWER = "<image>\nWho may have drawn this, and when?", "That cannot be said from it alone."
LONG_ANSWER = (
    "The image is a drawing with clear outlines and few colors, as they are made for signs, letters and web pages. "
    "Its subject stands alone on an empty ground, seen from the front, and there is neither text nor a frame around it."
)
CHANGES = (("clear", "sharp"), ("stands alone", "is alone"))
FOUND = ("resized", "compressed", "both", "reworded")
"""Kinds of copies that should be found."""


@dataclass(frozen=True)
class Planted:
    """A sample, and what it is."""

    sample: Sample
    original: int
    kind: str


def clip_art(count: int, draw: random.Random) -> Iterator[tuple[str, Image.Image]]:
    """Yield name and drawing of some files."""
    listed = (file for file in CLIP_ART.rglob("*.png") if LINES not in file.parts)
    files = sorted(file for file in listed if file.stat().st_size < MAX_BYTES)
    for file in draw.sample(files, min(count, len(files))):
        with Image.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                continue
            drawing = image.convert("RGBA")
        drawing.thumbnail((LARGEST, LARGEST))
        if min(drawing.size) >= 32 and drawing.getextrema()[3][1] > 0:
            yield str(file.relative_to(CLIP_ART)), drawing


def emoji(count: int, draw: random.Random) -> Iterator[tuple[str, Image.Image]]:
    """Yield code and drawing of some emoji; all characters of a size of the font's."""
    face = ImageFont.truetype(str(EMOJI), FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    codes = sorted(TTFont(EMOJI).getBestCmap())
    for code in draw.sample(codes, min(count, len(codes))):
        drawing = Image.new("RGBA", (CANVAS, CANVAS))
        with contextlib.suppress(OSError):
            ImageDraw.Draw(drawing).text((CANVAS / 2,) * 2, chr(code), anchor="mm", font=face, embedded_color=True)
        if drawing.getbbox() is not None:
            yield f"U+{code:X}", drawing


SOURCES: dict[str, Callable[[int, random.Random], Iterator[tuple[str, Image.Image]]]] = {
    "openclipart-png": clip_art,
    "emoji": emoji,
}


def on_white(drawing: Image.Image) -> Image.Image:
    """Return a drawing without transparency."""
    flat = Image.new("RGBA", drawing.size, "white")
    flat.alpha_composite(drawing)
    return flat.convert("RGB")


def resized(image: Image.Image, draw: random.Random) -> Image.Image:
    """Return an image of another size, at least 48 pixels wide and high."""
    scale = max(draw.choice((0.4, 0.5, 0.75, 1.5, 2)), 48 / min(image.size))
    size = (round(image.width * scale), round(image.height * scale))
    return image.resize(size, draw.choice(FILTERS))


def recolored(image: Image.Image, draw: random.Random) -> Image.Image:
    """Return an image with other hues, or in gray."""
    if draw.random() < 0.3:
        return ImageOps.grayscale(image).convert("RGB")
    pixels = np.asarray(image.convert("HSV")).copy()
    pixels[..., 0] += np.uint8(draw.randrange(40, 216))
    return Image.fromarray(pixels, "HSV").convert("RGB")


def encoded(image: Image.Image, quality: int | None = None) -> bytes:
    """Return an image as PNG, or as JPEG of a quality."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG") if quality is None else image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def copies(original: int, drawing: Image.Image, draw: random.Random) -> list[Planted]:
    """Return an image's own sample and its copies."""
    image = on_white(drawing)
    plain = encoded(drawing)
    long = LONG_ANSWER
    for before, after in CHANGES:
        long = long.replace(before, after)
    made = {
        "original": Sample(QUESTION, ANSWER, plain),
        "resized": Sample(QUESTION, ANSWER, encoded(resized(drawing, draw))),
        "compressed": Sample(QUESTION, ANSWER, encoded(image, draw.randrange(30, 91))),
        "both": Sample(QUESTION, ANSWER, encoded(resized(image, draw), draw.randrange(50, 91))),
        "recolored": Sample(QUESTION, ANSWER, encoded(recolored(image, draw))),
        "long": Sample(QUESTION, LONG_ANSWER, plain),
        "reworded": Sample(QUESTION, long, plain),
        "asked": Sample(OTHER_QUESTION, OTHER_ANSWER, plain),
    }
    return [Planted(sample, original, kind) for kind, sample in made.items()]


def sheet(pairs: list[tuple[bytes, bytes]], file: Path) -> None:
    """Write pairs of images, four to a row."""
    cell = 130
    image = Image.new("RGB", (8 * cell + 60, cell * max(1, -(-len(pairs) // 4))), "white")
    for n, pair in enumerate(pairs):
        for side, data in enumerate(pair):
            with Image.open(io.BytesIO(data)) as opened:
                small = on_white(opened.convert("RGBA"))
            small.thumbnail((cell - 6, cell - 6))
            image.paste(small, (n % 4 * (2 * cell + 20) + side * cell, n // 4 * cell))
    image.save(file)


def measure(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Return precision, and recall by kind, on one source."""
    draw = random.Random(options.seed)
    names, planted, known = [], list[Planted](), dict[bytes, int]()
    for number, (label, drawing) in enumerate(SOURCES[name](options.num_pictures, draw)):
        names.append(label)
        made = copies(known.setdefault(on_white(drawing).tobytes(), number), drawing, draw)
        planted += made if number % options.every == 0 else made[:1]
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        path = write_shards(Path(folder) / "shards", [x.sample for x in planted], 1)
        dedup([
            "--data-path", str(path), "--out", str(options.out / name), "--num-workers", str(options.workers),
            "--match", options.match,
        ])  # fmt: skip
    rows = [json.loads(line) for line in (options.out / name / LIST).read_text().splitlines()]
    pairs = [(planted[int(row["of"]["key"])], planted[int(row["duplicate"]["key"])], row) for row in rows]
    wrong = [pair for pair in pairs if pair[0].original != pair[1].original]
    sheet([(a.sample.picture or b"", b.sample.picture or b"") for a, b, _ in wrong], options.out / f"{name}.png")
    found = Counter(b.kind for a, b, _ in pairs if a.original == b.original)
    total = sum(x.kind == "resized" for x in planted)
    return {
        "pictures": len(names),
        "samples": len(planted),
        "pairs": len(pairs),
        "of different files": [[names[a.original], names[b.original], row["image_difference"]] for a, b, row in wrong],
        "precision": 1 - len(wrong) / max(1, len(pairs)),
        "recall": {kind: found[kind] / total for kind in (*FOUND, "recolored", "asked")},
    }


def main() -> None:
    """Measure both sources, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--num-pictures", type=int, default=1500, help="of each source, at most")
    parser.add_argument("--every", type=int, default=5, help="one of so many has copies")
    parser.add_argument("--match", choices=("sample", "image"), default="sample")
    parser.add_argument("--sources", nargs="+", choices=tuple(SOURCES), default=list(SOURCES))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports and the pairs that look wrong")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    results = {name: measure(name, options) for name in options.sources}
    table = Table("source", "pictures", "pairs", "of different files", "precision", *FOUND, "recolored", "asked")
    for name, row in results.items():
        recall, wrong = row["recall"], row["of different files"]
        assert isinstance(recall, dict) and isinstance(wrong, list)
        figures = [f"{row['precision']:.4f}", *(f"{value:.3f}" for value in recall.values())]
        table.add_row(name, str(row["pictures"]), str(row["pairs"]), str(len(wrong)), *figures)
    Console(width=160).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
