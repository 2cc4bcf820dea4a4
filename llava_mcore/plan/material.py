"""The data that a plan assumes, or that a prepared dataset has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.sizes.media import audio_work, image_work
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import PackWork, Sample, Work, causal, packs_of, padded


def sample_work(model: Model, sample: Sample) -> Work:
    """Return the work of a conversation alone."""
    work = Work()
    for width, height in sample.image_sizes:
        work += image_work(model, width, height)
    if sample.seconds is not None:
        work += audio_work(model, sample.seconds)
    tokens = sample.text + work.media_tokens
    return replace(work, tokens=tokens, trained=sample.trained, samples=1.0, causal_pairs=causal(tokens))


def packs_for(model: Model, layout: RunLayout, samples: Sequence[Sample]) -> PackWork:
    """Return the work of a pack, or of a sample; with what padding adds, and on each of the ranks that divide it.

    Raises:
        ValueError: no sample is short enough.
    """
    packs = packs_of([sample_work(model, x) for x in samples], layout.seq_length, packing=layout.packing)
    multiple = layout.computed_multiple

    def with_padding(work: Work, length: float) -> Work:
        return replace(work, computed=float(padded(length, multiple))).divided(layout.cp)

    def peak(work: Work, length: float) -> Work:
        part = with_padding(work, length)
        return replace(part, trained=min(work.trained, part.computed))  # they may all be one rank's

    if layout.packing:
        mean = with_padding(packs.mean, packs.mean.tokens)
        return PackWork(mean, (peak(packs.peaks[0], packs.mean.tokens), peak(packs.peaks[1], packs.mean.tokens)))
    # Without packing a micro-batch is as long as its longest sample.
    longest = max(x.tokens for x in packs.peaks)
    share = 1 - 1 / layout.micro_batch_size
    mean = with_padding(packs.mean, packs.mean.tokens + share * (longest - packs.mean.tokens))
    return PackWork(mean, (peak(packs.peaks[0], longest), peak(packs.peaks[1], longest)))
