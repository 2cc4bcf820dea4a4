"""Emoji as labeled images: Google's drawings (fonts-noto-color-emoji), sorted as Unicode sorts them (unicode-data).

Only emoji of one character are taken. A family is a set of emoji that look alike except for their color, or whose names
differ by a color, a size or a direction only: a family is trained on or held out as a whole.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CANVAS = 144
"""Pixels along an edge of an image; the drawings in the font have 136 x 128."""
FONT_SIZE = 109
"""The only size that the font has."""
ALIKE = 0.06
"""Mean absolute difference of two gray thumbnails (0 black, 1 white) below which they are of one family."""
SPLIT_SEED = 0
HELD_OUT = 0.2
HUES = ((340, "pink"), (300, "purple"), (255, "blue"), (165, "green"), (65, "yellow"), (40, "orange"), (15, "red"))
"""Below so many degrees a hue has this name, and above all of them it is red."""
LINE = re.compile(r"(?P<code>[0-9A-F]+)(?: FE0F)?\s*; fully-qualified\s*# \S+ E[\d.]+ (?P<name>.+)")
QUALIFIERS = re.compile(
    r"\b(red|orange|yellow|green|blue|purple|brown|black|white|light|dark|medium|small|large|first|last|full|new|quarter"
    r"|waxing|waning|crescent|gibbous|up|down|left|right|upwards|downwards|upper|lower|leftwards|rightwards|clockwise"
    r"|counterclockwise|thirty|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|increasing|decreasing)\b"
)
KINDS: dict[str, str] = {
    "animal": "cat-face monkey-face animal-mammal animal-bird animal-amphibian animal-reptile animal-marine animal-bug",
    "building": "place-building place-religious",
    "clothing": "clothing",
    "drink": "drink",
    "face": "face-smiling face-affection face-tongue face-hand face-neutral-skeptical face-sleepy face-unwell face-hat "
    "face-glasses face-concerned face-negative face-costume",
    "food": "food-fruit food-vegetable food-prepared food-asian food-marine food-sweet",
    "hand": "hand-fingers-open hand-fingers-partial hand-single-finger hand-fingers-closed hands hand-prop",
    "instrument": "musical-instrument",
    "person": "person person-gesture person-role person-fantasy person-activity person-sport person-resting family",
    "plant": "plant-flower plant-other",
    "sport": "sport",
    "symbol": "transport-sign warning arrow religion zodiac av-symbol math punctuation currency other-symbol alphanum "
    "geometric",
    "tool": "tool",
    "vehicle": "transport-ground transport-water transport-air",
}
"""What the images show -> Unicode's subgroups of it. The others are not used."""
_KIND_OF = {subgroup: kind for kind, subgroups in KINDS.items() for subgroup in subgroups.split()}


@dataclass(frozen=True)
class Emoji:
    """One emoji. `code` is its number in hexadecimal; `color` is None where no color covers half of it."""

    code: str
    name: str
    kind: str
    color: str | None
    drawing: Image.Image


def read_emoji(font: Path, table: Path) -> list[Emoji]:
    """Return the emoji that have a kind and a drawing, in Unicode's order.

    Args:
        font: NotoColorEmoji.ttf.
        table: emoji-test.txt.
    """
    face = ImageFont.truetype(str(font), FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    found = []
    middle = (CANVAS / 2, CANVAS / 2)
    for code, name, kind in _named(table.read_text(encoding="utf-8").splitlines()):
        drawing = Image.new("RGBA", (CANVAS, CANVAS))
        ImageDraw.Draw(drawing).text(middle, chr(int(code, 16)), anchor="mm", font=face, embedded_color=True)
        if drawing.getbbox() is not None:
            found.append(Emoji(code, name, kind, main_color(drawing), drawing))
    return found


def _named(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield code, name and kind of each emoji of one character in emoji-test.txt."""
    kind = None
    for line in lines:
        if line.startswith("# subgroup: "):
            kind = _KIND_OF.get(line.removeprefix("# subgroup: ").strip())
        elif kind is not None and (match := LINE.fullmatch(line.strip())):
            yield match["code"], match["name"], kind


def main_color(drawing: Image.Image) -> str | None:
    """Return the color that covers at least half of a drawing on a transparent ground, if there is one."""
    pixels = np.asarray(drawing.convert("RGB").convert("HSV")).reshape(-1, 3)
    names = color_names(pixels[np.asarray(drawing)[..., 3].reshape(-1) > 127])
    if not names:
        return None
    name, count = Counter(names).most_common(1)[0]
    return name if count * 2 >= len(names) else None


def color_names(pixels: NDArray[np.uint8]) -> list[str]:
    """Return the name of each pixel's color. `pixels` [n, 3] is Pillow's HSV: all three from 0 to 255."""
    hue, saturation, value = pixels[:, 0] * (360 / 255), pixels[:, 1] / 255, pixels[:, 2] / 255
    names = np.full(len(pixels), "red", dtype="<U6")
    for bound, name in HUES:
        names[hue < bound] = name
    names[(hue < 45) & (value < 0.7)] = "brown"
    pale = saturation < 0.2
    names[pale] = "gray"
    names[pale & (value > 0.85)] = "white"
    names[value < 0.25] = "black"
    return [str(name) for name in names]


def thumbnail(drawing: Image.Image) -> NDArray[np.float64]:
    """Return a small gray version on white, [576], from 0 (black) to 1, stretched to its full range of gray."""
    flat = Image.new("RGBA", drawing.size, "white")
    flat.alpha_composite(drawing)
    gray = np.asarray(flat.convert("L").resize((24, 24), Image.Resampling.BOX), dtype=np.float64).reshape(-1) / 255
    return 1 - (1 - gray) / max(1 - gray.min(), 0.1)


def families(emoji: list[Emoji]) -> list[list[Emoji]]:
    """Return the emoji in sets that look alike or are named alike."""
    parent = list(range(len(emoji)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    thumbnails = np.stack([thumbnail(x.drawing) for x in emoji])
    names: dict[str, int] = {}
    for i, one in enumerate(emoji):
        bare = " ".join(QUALIFIERS.sub(" ", one.name.replace("-", " ")).split())
        alike = np.flatnonzero(np.abs(thumbnails[:i] - thumbnails[i]).mean(axis=1) < ALIKE)
        for j in [*alike.tolist(), *([names[bare]] if bare in names else [])]:
            parent[root(j)] = root(i)
        names.setdefault(bare, i)
    sets: dict[int, list[Emoji]] = defaultdict(list)
    for i, one in enumerate(emoji):
        sets[root(i)].append(one)
    return list(sets.values())


def split(sets: list[list[Emoji]]) -> tuple[list[Emoji], list[Emoji]]:
    """Return (to train on, held out): about a fifth of the emoji of every kind, in whole families, always the same."""
    sizes = Counter(one.kind for family in sets for one in family)
    held: Counter[str] = Counter()
    sides: tuple[list[Emoji], list[Emoji]] = ([], [])
    for family in random.Random(SPLIT_SEED).sample(sets, len(sets)):
        new = Counter(one.kind for one in family)
        fits = all(held[kind] + n <= math.ceil(HELD_OUT * sizes[kind]) for kind, n in new.items())
        held.update(new if fits else {})
        sides[fits].extend(family)
    return sides


def picture(one: Emoji, rng: random.Random | None = None) -> Image.Image:
    """Return the emoji on white, RGB, CANVAS pixels; with `rng` turned, scaled, moved and perhaps mirrored."""
    drawing = one.drawing
    if rng is not None:
        if one.kind != "symbol" and rng.random() < 0.5:
            drawing = drawing.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        angle, scale = math.radians(rng.uniform(-15, 15)), 1 / rng.uniform(0.75, 1.05)
        cos, sin, middle = math.cos(angle) * scale, math.sin(angle) * scale, CANVAS / 2
        x, y = (middle + rng.uniform(-1, 1) * CANVAS / 14 for _ in range(2))
        matrix = (cos, sin, middle - cos * x - sin * y, -sin, cos, middle + sin * x - cos * y)
        drawing = drawing.transform(drawing.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    flat = Image.new("RGBA", drawing.size, "white")
    flat.alpha_composite(drawing)
    return flat.convert("RGB")
