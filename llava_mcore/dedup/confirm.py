"""Reads two samples again and says whether they are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llava_mcore.data.samples import ChatSample
from llava_mcore.dedup.candidates import TEXT_THRESHOLD, Match
from llava_mcore.dedup.signature import SamplePlace, images_of, jaccard, text_of

SIDE, BLOCKS = 32, 8
"""Images are compared as SIDE x SIDE pixels, in BLOCKS x BLOCKS blocks; in finer ones, copies of thin lines differ."""
MAX_DIFFERENCE = 0.045
"""Mean difference of color values from 0 to 1."""
MAX_RELATIVE = 0.35
"""Root of the mean squared difference, as a fraction of the image's own standard deviation: drawings of few lines have
small differences whatever they show."""
MAX_IN_BLOCK, MAX_SPREAD = 0.05, 2.5
"""A block may differ by MAX_IN_BLOCK, and by MAX_SPREAD times the mean difference. What resizing and compressing change
is everywhere; another mouth of the same emoji is in one block. Chosen by `benchmarks.dedup_planted`."""
LEAST_DEVIATION = 0.02
"""That of an image of one color: noise of compressing it is no difference."""
MAX_ASPECT = 1.05
"""Ratio of two images' aspect ratios."""
CACHED = 256


@dataclass(frozen=True)
class Confirmed:
    """How two samples are the same."""

    text: float
    """Jaccard similarity of their texts."""
    image: float | None
    """Largest mean difference of their images, from 0 to 1; None if images were not compared."""


class Confirmer:
    """Compares samples."""

    def __init__(self, read: Callable[[SamplePlace], ChatSample], match: Match) -> None:
        """read: returns a sample that has been read before."""
        self._match = match
        self._contents = functools.lru_cache(maxsize=CACHED)(functools.partial(_contents, read))

    def compare(self, one: SamplePlace, other: SamplePlace) -> Confirmed | None:
        """Return how two samples are the same; None if they are not."""
        (text, images), (other_text, other_images) = self._contents(one), self._contents(other)
        similarity = jaccard(text, other_text)
        if self._match != "image" and similarity < TEXT_THRESHOLD:
            return None
        if self._match == "text":
            return Confirmed(similarity, None)
        if self._match == "image":
            differences = [difference(a, b) for a in images for b in other_images]
            same = [value for value in differences if value is not None]
            return Confirmed(similarity, min(same)) if same else None
        if len(images) != len(other_images):
            return None
        differences = [difference(a, b) for a, b in zip(images, other_images, strict=True)]
        if any(value is None for value in differences):
            return None
        return Confirmed(similarity, max((x for x in differences if x is not None), default=None))


@dataclass(frozen=True)
class Small:
    """An image as it is compared."""

    pixels: NDArray[np.float32]
    """[SIDE, SIDE, 3], from 0 to 1."""
    aspect: float
    deviation: float
    """Standard deviation of the pixels from the mean color, at least LEAST_DEVIATION."""


def difference(one: Small, other: Small) -> float | None:
    """Return the mean difference of two images, from 0 to 1, if they are the same; else None."""
    if max(one.aspect / other.aspect, other.aspect / one.aspect) > MAX_ASPECT:
        return None
    differing = np.abs(one.pixels - other.pixels)
    mean = float(differing.mean())
    if mean > MAX_DIFFERENCE or _rms(differing) > MAX_RELATIVE * max(one.deviation, other.deviation):
        return None
    width = SIDE // BLOCKS
    blocks = differing.reshape(BLOCKS, width, BLOCKS, width, 3).mean(axis=(1, 3, 4))
    return mean if blocks.max() <= MAX_IN_BLOCK + MAX_SPREAD * mean else None


def small(image: Image.Image) -> Small:
    """Return an image as it is compared."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)).astype(np.float32)
    pixels /= np.float32(255)
    return Small(pixels, image.width / image.height, max(_rms(pixels - pixels.mean(axis=(0, 1))), LEAST_DEVIATION))


def _rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _contents(read: Callable[[SamplePlace], ChatSample], place: SamplePlace) -> tuple[str, list[Small]]:
    chat = read(place)
    return text_of(chat), [small(image) for image in images_of(chat)]
