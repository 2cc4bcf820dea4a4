"""The data that a plan assumes, or that a prepared dataset has."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.sizes.media import picture_work, sound_work
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import PackWork, Sample, Work, causal, packs_of, padded


def sample_work(model: Model, sample: Sample) -> Work:
    """Return the work of a conversation alone."""
    work = Work()
    for width, height in sample.pictures:
        work += picture_work(model, width, height)
    if sample.seconds is not None:
        work += sound_work(model, sample.seconds)
    tokens = sample.text + work.media_tokens
    return replace(work, tokens=tokens, trained=sample.trained, samples=1.0, causal_pairs=causal(tokens))


def packs_for(model: Model, layout: RunLayout, samples: Sequence[Sample]) -> PackWork:
    """Return the work of a pack, or of a sample; with what padding adds, and on each of the ranks that divide it.

    Raises:
        ValueError: no sample is short enough.
    """
    packs = packs_of([sample_work(model, x) for x in samples], layout.seq_length, packing=layout.packing)
    multiple, most_share = layout.computed_multiple, images_share(model, layout, samples)

    def with_padding(work: Work, length: float) -> Work:
        length, positions = float(padded(length, multiple)), most_share * work.positions
        return replace(work, computed=length, local_positions=positions).divided(layout.cp)

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


def images_share(model: Model, layout: RunLayout, samples: Sequence[Sample]) -> float:
    """Return the part of a micro-batch's images that the rank with most of them computes: from the largest one on, each
    goes to the rank that has least (as in `parallel.items`)."""
    if layout.tower_ranks == 1:
        return 1.0
    largest_loads = total = 0.0
    for items in _micro_batches(model, layout, samples):
        loads = [0.0] * layout.tower_ranks
        for positions in sorted(items, reverse=True):
            heapq.heappush(loads, heapq.heappop(loads) + positions)
        largest_loads, total = largest_loads + max(loads), total + sum(loads)
    return largest_loads / total if total else 1 / layout.tower_ranks


def _micro_batches(model: Model, layout: RunLayout, samples: Sequence[Sample]) -> Iterator[list[float]]:
    """Yield the positions of each tile, image or clip of a micro-batch."""
    size, items, tokens, count = layout.micro_batch_size, [], 0.0, 0
    for sample in samples:
        media = [picture_work(model, *x) for x in sample.pictures]
        media += [] if sample.seconds is None else [sound_work(model, sample.seconds)]
        items += [x.positions / x.pictures for x in media for _ in range(round(x.pictures))]
        tokens, count = tokens + sample.text + sum(x.media_tokens for x in media), count + 1
        if tokens >= size * layout.seq_length if layout.packing else count == size:
            yield items
            items, count = [], 0
            tokens = tokens - size * layout.seq_length if layout.packing else 0.0
    yield items
