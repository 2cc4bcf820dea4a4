"""The samples of a prepared dataset, as its manifest describes them; or assumed ones."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.errors import ConfigError
from llava_mcore.plan.material import sample_work
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import NUM_SAMPLES, Sample, like_llava, spoken

MANIFEST = "manifest.json"
EARLIER_NAMES = {"pictures": "images", "sounds": "audios", "sound_seconds": "audio_seconds"}
"""Names in a manifest that version 0.1.0 wrote -> those of today."""
BINS_PER_OCTAVE = 8
"""A manifest's histograms have bins of equal width on a logarithmic axis, so that they stay small for any data."""
ASPECT = 4 / 3
"""Width over height of images of which only the longer side is known."""
TRAINED = 0.5
"""Fraction of a text's tokens whose loss counts, where nobody has counted them."""


@dataclass(frozen=True)
class Material:
    """Samples, and where they come from, in words."""

    samples: Sequence[Sample]
    words: str


def assumed(model: Model, path: object = None) -> Material:
    """Return what a plan assumes without data. `path`: data that has no manifest."""
    why = "" if path is None else f"{path} has no readable {MANIFEST}; "
    if model.hears:
        return Material(spoken(), f"{why}assumed: clips of 2 to 16 seconds with their transcripts")
    samples = like_llava()
    words = "assumed: conversations like LLaVA's mix, nine of ten with an image of 640 x 480"
    mean = sum(sample_work(model, x).tokens for x in samples) / len(samples)
    return Material(samples, f"{why}{words}, {mean:.0f} tokens on average")


def material_of(model: Model, path: Path | str | None) -> Material:
    """Return the samples of a dataset, or assumed ones. ConfigError for a folder that does not exist."""
    if path is None:
        return assumed(model)
    if isinstance(path, str):
        return assumed(model, path)
    if not path.exists():
        raise ConfigError(f"--data-path {path}: no such folder; omit it to plan with assumed data")
    file = path / MANIFEST
    try:
        totals = json.loads(file.read_bytes())["totals"]
        return _from_totals(model, totals, path)
    except (OSError, ValueError, KeyError, TypeError):
        return assumed(model, path)


def _from_totals(model: Model, totals: Mapping[str, Any], path: Path) -> Material:
    conversations = int(totals["conversations"])
    if not conversations:
        raise ValueError("no conversations")
    draw = random.Random(0)
    lengths = _quantiles(totals["tokens"], draw) or [200.0 + 577 * (i % 10 > 0) for i in range(NUM_SAMPLES)]
    sides = _quantiles(totals["sides"], draw) or [640.0] * NUM_SAMPLES
    totals = {EARLIER_NAMES.get(name, name): value for name, value in totals.items()}
    per_sample = int(totals["images"] + totals.get("frames", 0)) / conversations
    seconds = int(totals["audio_seconds"]) / max(1, int(totals["audios"])) if totals.get("audios") else None
    next_side = itertools.cycle(sides)
    samples, due = [], 0.0
    for length in lengths:
        due += per_sample
        count = int(due)
        due -= count
        image_sizes = tuple((round(side), round(side / ASPECT)) for side in itertools.islice(next_side, count))
        media = sample_work(model, Sample(0, 0, image_sizes, seconds)).tokens
        text = max(16, round(length - media))
        samples.append(Sample(text, max(1, round(TRAINED * text)), image_sizes, seconds))
    tokens = "" if totals["tokens"]["number"] else ", whose tokens are not counted (prepare --tokenizer-load-dir)"
    words = f"{path}: {conversations:,} conversations, {per_sample:.2f} images each{tokens}"
    return Material(samples, f"{words}; assumed: {TRAINED:.0%} of the text is trained")


def _quantiles(histogram: Mapping[str, Any], draw: random.Random) -> list[float]:
    """Return numbers that are distributed as a histogram's, with its mean, in random order."""
    bins = [(2 ** ((int(b) + 0.5) / BINS_PER_OCTAVE), int(n)) for b, n in histogram["bins"]]
    total = sum(n for _, n in bins)
    if not total:
        return []
    edges = list(itertools.accumulate(n for _, n in bins))
    values, place = [], 0
    for i in range(NUM_SAMPLES):
        while edges[place] <= (i + 0.5) / NUM_SAMPLES * total:
            place += 1
        values.append(bins[place][0])
    scale = int(histogram["total"]) / total / (sum(values) / len(values))
    draw.shuffle(values)
    return [value * scale for value in values]
