"""The sequence of samples of one stream: weights choose the dataset, and its order chooses one of its samples.

Its position is a few counters.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llava_mcore.data.order.dataset_order import DatasetOrder, seed_of
from llava_mcore.errors import DataError, problems


class Progress(NamedTuple):
    """How far a run is."""

    iterations: float = 0
    tokens: float = 0
    """Tokens of all global batches, with those of media, without padding."""


class WeightPoint(NamedTuple):
    """A dataset's weight at a time; between two points it changes linearly, outside of them it stays."""

    at: float
    weight: float


@dataclass(frozen=True)
class Schedule:
    """A weight over time."""

    points: tuple[WeightPoint, ...]
    unit: Literal["iterations", "tokens"] = "iterations"

    @classmethod
    def constant(cls, weight: float) -> Schedule:
        """Return a weight that stays the same."""
        return cls((WeightPoint(0, weight),))

    def at(self, progress: Progress) -> float:
        """Return the weight at a time."""
        time = progress.iterations if self.unit == "iterations" else progress.tokens
        index = bisect.bisect_right(self.points, time, key=lambda point: point.at)
        if index == 0:
            return self.points[0].weight
        before = self.points[index - 1]
        if index == len(self.points):
            return before.weight
        after = self.points[index]
        return before.weight + (after.weight - before.weight) * (time - before.at) / (after.at - before.at)


@dataclass(frozen=True)
class Share:
    """How much of a blend a dataset is."""

    name: str
    """Path of the dataset, for messages."""
    num_samples: int
    schedule: Schedule
    """Weight of its samples among those of all datasets; they need not add up to 1."""
    most_passes: float | None = None
    """Passes after which it is left out; None: no limit."""

    @property
    def most_samples(self) -> int | None:
        """Samples after which it is left out."""
        return None if self.most_passes is None else int(self.most_passes * self.num_samples)


def check_shares(shares: Sequence[Share]) -> None:
    """Raise one DataError with everything that is wrong with the weights of a blend."""
    errors = [problem for share in shares for problem in _problems(share)]
    if not errors and not any(point.weight for share in shares for point in share.schedule.points):
        errors = ["all weights are 0"]
    if errors:
        raise DataError(problems("the blend cannot be read", errors))


def _problems(share: Share) -> list[str]:
    points = share.schedule.points
    result = []
    if share.num_samples < 1:
        result.append(f"{share.name} has no samples")
    if any(not 0 <= point.weight < float("inf") for point in points):
        weights = ", ".join(f"{point.weight:g}" for point in points)
        result.append(f"{share.name}: weights must be finite and at least 0, found {weights}")
    if any(after.at <= before.at for before, after in itertools.pairwise(points)):
        result.append(f"{share.name}: the times of its weights must ascend: {', '.join(f'{p.at:g}' for p in points)}")
    if share.most_passes is not None and share.most_passes <= 0:
        result.append(f"{share.name}: max_epochs must be more than 0, found {share.most_passes:g}")
    return result


def next_dataset(credits: list[float], weights: Sequence[float]) -> int:
    """Return the dataset of the next sample, and update `credits` in place.

    Every dataset is owed its weight at each draw, and pays 1 when it is drawn; the one that is owed most comes next. So
    after n draws with constant weights each dataset has had its share of n, give or take one sample.

    Raises ValueError if no weight is positive.
    """
    total = sum(weights)
    if total <= 0:
        raise ValueError("no dataset of the blend has a positive weight")
    for index, weight in enumerate(weights):
        credits[index] += weight / total
    chosen = max((index for index, weight in enumerate(weights) if weight > 0), key=lambda index: credits[index])
    credits[chosen] -= 1
    return chosen


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
