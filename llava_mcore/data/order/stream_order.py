"""The sequence of samples of one stream, and its position: a few counters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llava_mcore.data.order.dataset_order import DatasetOrder, seed_of
from llava_mcore.data.order.mixture import Progress, Share, next_dataset

START = Progress()


class ChosenSample(NamedTuple):
    """A sample by numbers."""

    dataset: int
    """Index in the blend."""
    pass_index: int
    sample: int
    """Its number in the dataset."""


@dataclass(frozen=True)
class Mixture:
    """The datasets that all streams of a run read."""

    shares: tuple[Share, ...]
    orders: tuple[DatasetOrder, ...]
    num_streams: int
    seed: int

    @classmethod
    def of(cls, shares: Sequence[Share], *, window: int, num_streams: int, seed: int) -> Mixture:
        """Return the mixture of datasets whose samples are shuffled within `window` samples."""
        orders = [DatasetOrder(x.num_samples, window, seed_of(seed, n)) for n, x in enumerate(shares)]
        return cls(tuple(shares), tuple(orders), num_streams, seed)

    def place_of(self, dataset: int, stream: int, count: int) -> int:
        """Return the position in a dataset that a stream reads after `count` other ones.

        The streams take consecutive positions, in turn. Where passes are not shuffled, a stream that always took the
        same turn would meet the same samples again: with as many samples as streams, one of them. So the turns move by
        one when the streams meet the start of a pass again.
        """
        order, streams = self.orders[dataset], self.num_streams
        if order.window > 1:
            return streams * count + stream
        cycle = streams * count // math.lcm(order.num_samples, streams)
        return streams * count + (stream + cycle) % streams


class StreamOrder:
    """The samples of one stream: of every dataset one of each S consecutive positions (`Mixture.place_of`).

    So all streams together read each dataset in its order, whatever processes serve them.
    """

    def __init__(self, mixture: Mixture, stream: int) -> None:
        self._mixture, self._stream = mixture, stream
        count = len(mixture.shares)
        self.counts = [0] * count
        """Samples that were chosen of each dataset."""
        # Streams start at different points of the round, so that a step mixes datasets.
        self.credits = [seed_of(mixture.seed, stream, n) / 2**64 if count > 1 else 0.0 for n in range(count)]

    def next(self, progress: Progress = START) -> ChosenSample | None:
        """Return the next sample; None if every dataset has had as many passes as it may.

        Args:
            progress: for the schedules of weights.
        """
        positions = [self._mixture.place_of(n, self._stream, count) for n, count in enumerate(self.counts)]
        weights = [
            share.schedule.at(progress) if share.most_samples is None or position < share.most_samples else 0.0
            for share, position in zip(self._mixture.shares, positions, strict=True)
        ]
        if not any(weights):
            return None
        dataset = next_dataset(self.credits, weights)
        self.counts[dataset] += 1
        return ChosenSample(dataset, *self._mixture.orders[dataset].at(positions[dataset]))

    def position(self) -> dict[str, list[int] | list[float]]:
        """Return the position as lists of numbers, one for each dataset."""
        return {"counts": list(self.counts), "credits": list(self.credits)}

    def restore(self, position: dict[str, list[int] | list[float]]) -> None:
        """Continue from a position. KeyError, TypeError or ValueError if it is not one of this blend."""
        counts = [int(count) for count in position["counts"]]
        credits = [float(credit) for credit in position["credits"]]
        if not len(counts) == len(credits) == len(self._mixture.shares):
            raise ValueError(f"a position of {len(counts)} datasets, but there are {len(self._mixture.shares)}")
        self.counts, self.credits = counts, credits
