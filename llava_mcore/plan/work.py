"""The work of a micro-batch, and the samples that it is made of."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Work:
    """Counts of a micro-batch on one data- and context-parallel rank; means are not whole numbers.

    `computed`: tokens that the layers compute, padding included. `causal_pairs`: (query, key) pairs of the decoder's
    attention. `trained`: tokens whose loss counts. `positions`, `pairs`, `window_pairs`: of the tower, in a layer that
    sees whole images and in one that sees windows; `local_positions`: those of the rank that has most, where ranks
    divide the images. `num_items`: tiles, images or clips.
    """

    tokens: float = 0.0
    computed: float = 0.0
    causal_pairs: float = 0.0
    trained: float = 0.0
    samples: float = 0.0
    media_tokens: float = 0.0
    positions: float = 0.0
    local_positions: float = 0.0
    pairs: float = 0.0
    window_pairs: float = 0.0
    num_items: float = 0.0
    pixel_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def times(self, factor: float) -> Work:
        """Return the same for so many as large."""
        return Work(*(factor * a for a in self.values()))

    def divided(self, ranks: int) -> Work:
        """Return the work of each of the ranks that divide the tokens of samples. All have all media."""
        parts = {name: vars(self)[name] / ranks for name in ("tokens", "computed", "causal_pairs", "trained")}
        return replace(self, **parts)

    def values(self) -> tuple[float, ...]:
        """Return the counts in their order."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Sample:
    """A conversation. `text`: tokens of its text. `image_sizes`: widths and heights. `seconds`: length of its audio."""

    text: int
    trained: int
    image_sizes: tuple[tuple[int, int], ...] = ()
    seconds: float | None = None


WAITING = 16
"""Packs with room that wait for shorter samples."""
NUM_SAMPLES = 400
"""Samples that stand for a dataset: enough for means within one percent, and few enough for a plan in a second."""


def like_llava(sizes: Sequence[tuple[int, int]] = ((640, 480),), num_images: int = 1) -> list[Sample]:
    """Return samples like those of LLaVA's mix: nine of ten have an image, and all but a few answers are short.

    With more images, each sample has `num_images` of them, and an answer as long as those to as many.
    """
    draw = random.Random(0)
    samples = []
    for index in range(NUM_SAMPLES):
        answer = sum(min(3000, int(draw.lognormvariate(5, 0.8)) + 8) for _ in range(num_images))
        images = range(index * num_images, (index + 1) * num_images) if draw.random() < 0.9 or num_images > 1 else ()
        image_sizes = tuple(sizes[i % len(sizes)] for i in images)
        samples.append(Sample(text=34 + answer, trained=answer + 2, image_sizes=image_sizes))
    return samples


def spoken(shortest: float = 2.0, longest: float = 16.0, tokens_per_second: float = 3.6) -> list[Sample]:
    """Return clips with transcripts, of lengths that are drawn uniformly."""
    draw = random.Random(0)
    clips = [draw.uniform(shortest, longest) for _ in range(NUM_SAMPLES)]
    return [Sample(34 + round(tokens_per_second * x), 2 + round(tokens_per_second * x), seconds=x) for x in clips]


@dataclass(frozen=True)
class PackWork:
    """The work of packs of a sequence's length, or of single samples: the mean, and those that take most memory: the
    pack with most positions of the tower, and the one with most trained tokens."""

    mean: Work
    peaks: tuple[Work, Work]


def packs_of(works: Sequence[Work], seq_length: int, *, packing: bool) -> PackWork:
    """Put samples into packs, or leave them alone; longer ones are left out, as in training.

    Raises:
        ValueError: no sample is short enough.
    """
    short = [x for x in works if x.tokens <= seq_length]
    if not short:
        raise ValueError(f"the shortest sample has {min(x.tokens for x in works):.0f} tokens")
    packs = list(_packed(short, seq_length)) if packing else short
    total = Work()
    for item in packs:
        total += item
    peaks = max(packs, key=lambda x: (x.positions, x.tokens)), max(packs, key=lambda x: (x.trained, x.tokens))
    return PackWork(total.times(1 / len(packs)), peaks)


def _packed(works: Sequence[Work], seq_length: int) -> Iterator[Work]:
    """Yield packs. Two samples that are longer than half a pack are never in one.

    What they leave free is filled with shorter ones, the last of them in part: good packing finds some that fit.
    """
    packs: list[Work] = []  # with room, the oldest first
    for item in works:
        if 2 * item.tokens > seq_length:
            packs.append(item)
            if len(packs) > WAITING:
                yield packs.pop(0)
            continue
        rest = item
        while rest.tokens > 0:
            pack = packs.pop(0) if packs else Work()
            part = min(1.0, (seq_length - pack.tokens) / rest.tokens)
            pack, rest = pack + rest.times(part), rest.times(1 - part)
            if rest.tokens > 0:
                yield pack
            else:
                packs.insert(0, pack)
    # A single one at the end stands for a full one.
    yield from packs if len(packs) != 1 else [packs[0].times(seq_length / packs[0].tokens)]


def causal(length: float) -> float:
    """Return the pairs of a sample."""
    return length * (length + 1) / 2


def padded(length: float, multiple: int) -> int:
    """Return a length rounded up to a multiple."""
    return math.ceil(length / multiple) * multiple
