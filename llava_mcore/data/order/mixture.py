"""Mixes the datasets of a blend: which one the next sample of a stream comes from."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
